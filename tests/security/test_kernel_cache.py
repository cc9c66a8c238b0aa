"""Compiled programs and kernels on disk: only what this user wrote is run, and only as it was written."""

import os
import pickle
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest

import penstock.compll
from penstock.compll.backends.numba.backend import NumbaKernels, _kept_kernel
from penstock.compll.cache import default_cache, load_program
from penstock.compll.frontend.source import compile_file
from penstock.compll.lower.passes import dump
from penstock.private_folder import FolderError, make_private

SHIPPED = sorted((Path(penstock.compll.__file__).parent / "algorithms").glob("*.cll"))
BF16 = next(path for path in SHIPPED if path.stem == "bf16")
VALUES = np.linspace(-3, 3, 37, dtype=np.float32)


class Planted:
    """Unpickling it makes a file."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


def test_a_planted_pickle_is_not_loaded(tmp_path):
    load_program(BF16, {}, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    assert dump(load_program(BF16, {}, tmp_path)) == dump(compile_file(BF16))
    assert not (tmp_path / "ran").exists()


def test_no_file_is_unpickled():
    package = Path(penstock.compll.__file__).parents[1]
    found = [path.relative_to(package) for path in package.rglob("*.py") if "import pickle" in path.read_text()]
    # Objects that a script asks its ranks, which trust one another, to share.
    assert found == [Path("adaptor/world.py")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_program_comes_back_from_its_file_as_it_was(path, tmp_path):
    made = load_program(path, {}, tmp_path)
    found = load_program(path, {}, tmp_path)
    assert found is not made
    assert dump(found) == dump(made)
    assert (found.key, found.fingerprint, found.parameters) == (made.key, made.fingerprint, made.parameters)


def test_a_program_file_with_any_byte_changed_is_compiled_again(tmp_path):
    wanted = dump(load_program(BF16, {}, tmp_path))
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for place in range(0, len(whole), len(whole) // 40):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        kept.write_bytes(damaged)
        assert dump(load_program(BF16, {}, tmp_path)) == wanted
        assert kept.read_bytes() == whole


def encoded(folder):
    """Return a payload of kernels that a new process would load."""
    _kept_kernel.cache_clear()
    return NumbaKernels(load_program(BF16, {}, folder), cache_dir=folder).encode(VALUES, {}).tobytes()


def test_a_source_that_differs_from_its_digest_is_not_run(tmp_path):
    wanted = encoded(tmp_path)
    (source,) = tmp_path.glob("*.py")
    made, ran = source.read_text(), tmp_path / "ran"
    source.write_text(made.replace("import numpy as np\n", f"import numpy as np; open({str(ran)!r}, 'w')\n"))
    assert encoded(tmp_path) == wanted
    assert not ran.exists()
    assert source.read_text() == made


def test_machine_code_that_differs_from_its_digest_is_not_loaded(tmp_path):
    wanted, ran = encoded(tmp_path), tmp_path / "ran"
    files = [*tmp_path.glob("__pycache__/*.nbi"), *tmp_path.glob("__pycache__/*.nbc")]
    assert len(files) == 2
    for file in files:
        file.write_bytes(pickle.dumps(Planted(ran)))
        assert encoded(tmp_path) == wanted
        assert not ran.exists()


def test_without_a_home_nothing_is_kept_in_a_folder_that_others_can_make(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_cache() is None
    program = load_program(BF16, {})
    payload = NumbaKernels(program).encode(VALUES, {})
    assert NumbaKernels(program).encode(VALUES, {}).tobytes() == payload.tobytes()
    assert not list(tmp_path.iterdir())


def test_a_cache_folder_is_made_for_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert stat.S_IMODE(default_cache().stat().st_mode) == 0o700


@pytest.mark.parametrize(("mode", "used"), [(0o700, True), (0o755, True), (0o777, False), (0o707, False)])
def test_a_folder_that_others_may_write_is_not_used(tmp_path, mode, used):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    if used:
        assert stat.S_IMODE(make_private(folder).stat().st_mode) == 0o700
    else:
        with pytest.raises(FolderError, match="lets others write"):
            make_private(folder)


def test_a_folder_below_one_that_others_may_write_is_not_used(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(FolderError, match="no other may write"):
        make_private(tmp_path / "open" / "cache")


def test_a_link_is_not_used(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match="a link"):
        make_private(tmp_path / "cache")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = default_cache()
    os.chown(folder, 12345, 12345)
    assert default_cache() is None
    with pytest.raises(FolderError, match="user 12345's folder"):
        make_private(folder)
