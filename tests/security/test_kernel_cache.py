"""Compiled programs and kernels on disk: only what this user wrote is run, and only as it was written."""

import contextlib
import hashlib
import os
import pickle
import stat
import tempfile
import threading
from pathlib import Path

import numba
import numpy as np
import pytest

import penstock.compll
from penstock.compll.backends.numba.backend import NumbaKernels, _kept_kernel
from penstock.compll.cache import default_cache, load_program
from penstock.compll.frontend.source import compile_file
from penstock.compll.lower.passes import dump
from penstock.private_folder import FolderError, _check_inside, compiled, make_private

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


MODES = {0o700: True, 0o755: True, 0o777: False, 0o707: False, 0o770: False, 0o775: False, 0o720: False}


@pytest.mark.parametrize(("mode", "used"), MODES.items(), ids=lambda each: f"{each:o}")
def test_a_folder_that_others_may_write_is_not_used(tmp_path, mode, used):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    if used:
        assert stat.S_IMODE(make_private(folder).stat().st_mode) == 0o700
    else:
        with pytest.raises(FolderError, match="lets others write"):
            make_private(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o770])
def test_a_folder_below_one_that_others_may_write_is_not_used(tmp_path, mode):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(FolderError, match="no other may write"):
        make_private(tmp_path / "open" / "cache")


def test_folders_above_are_made_for_the_user_alone_under_any_umask(tmp_path):
    before = os.umask(0o002)
    try:
        made = make_private(tmp_path / "a" / "b" / "cache")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (made, *made.parents[:2])] == [0o700] * 3


def plant(folder, ran):
    """Have the source of a kernel that `encoded` made leave a file when it runs, under a digest that is right."""
    (source,) = folder.glob("*.py")
    text = source.read_text().rpartition("\n# sha256 ")[0]
    text = text.replace("import numpy as np\n", f"import numpy as np; open({str(ran)!r}, 'w')\n")
    source.write_text(f"{text}\n# sha256 {hashlib.sha256(text.encode()).hexdigest()}\n")
    for kept in folder.glob("__pycache__/*"):
        kept.unlink()
    return source


@pytest.fixture
def cache_with_kernels(tmp_path, monkeypatch):
    """A cache folder of the user's that holds kernels."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = default_cache()
    encoded(folder)
    _kept_kernel.cache_clear()
    _check_inside.cache_clear()
    return folder


def test_planted_code_runs_where_the_folder_is_trusted(cache_with_kernels, tmp_path):
    plant(cache_with_kernels, tmp_path / "ran")  # what the tests below hold off
    NumbaKernels(load_program(BF16, {})).encode(VALUES, {})
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("mode", [0o770, 0o775, 0o777])
def test_code_planted_in_a_folder_that_others_may_write_is_not_run(cache_with_kernels, tmp_path, mode):
    plant(cache_with_kernels, tmp_path / "ran")
    cache_with_kernels.chmod(mode)
    assert default_cache() is None
    NumbaKernels(load_program(BF16, {})).encode(VALUES, {})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_code_that_others_could_write_in_a_folder_open_to_them_is_not_run(cache_with_kernels, tmp_path, mode):
    plant(cache_with_kernels, tmp_path / "ran").chmod(mode)
    cache_with_kernels.chmod(0o755)
    assert default_cache() is None
    NumbaKernels(load_program(BF16, {})).encode(VALUES, {})
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_another_users_file_in_a_folder_that_is_private_now_is_not_run(cache_with_kernels, tmp_path):
    os.chown(plant(cache_with_kernels, tmp_path / "ran"), 12345, 12345)
    with pytest.raises(FolderError, match=r"user 12345's, mode 600.* another user may have written; remove it"):
        make_private(cache_with_kernels)
    NumbaKernels(load_program(BF16, {})).encode(VALUES, {})
    assert not (tmp_path / "ran").exists()


def test_links_above_a_folder_are_followed_once(tmp_path):
    """Who may replace a link leads nobody elsewhere after the folder was looked at."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert make_private(tmp_path / "link" / "cache") == (tmp_path / "real" / "cache").resolve()


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


def twice(value):
    """Return twice the value."""
    return value + value


def test_machine_code_of_our_own_functions_is_kept_where_only_the_user_may_write(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert compiled(twice)(2) == 4
    assert compiled(twice).stats.cache_path.startswith(str(tmp_path / ".cache/penstock/functions/"))
    assert stat.S_IMODE((tmp_path / ".cache/penstock/functions").stat().st_mode) == 0o700
    assert numba.config.CACHE_DIR == ""


def test_threads_that_compile_at_once_keep_nothing_in_the_working_directory(tmp_path, monkeypatch):
    """numba reads its setting several times; another thread must not put it back in between."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    both, left, seen = threading.Barrier(2), threading.Event(), []

    class Slow:
        def enable_caching(self):
            with contextlib.suppress(threading.BrokenBarrierError):
                if both.wait(0.5):  # until the other is here too, or cannot come
                    left.wait(5)
            seen.append(numba.config.CACHE_DIR)

    def compile_one():
        compiled(twice)
        left.set()

    monkeypatch.setattr(numba, "njit", lambda nogil: lambda function: Slow())
    threads = [threading.Thread(target=compile_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [str(tmp_path / ".cache/penstock/functions")] * 2
    assert numba.config.CACHE_DIR == ""


@pytest.mark.parametrize("home", ["open", "/proc/none"])
def test_machine_code_of_our_own_functions_is_not_kept_elsewhere(home, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    if home == "open":
        (tmp_path / home).mkdir()
        (tmp_path / home).chmod(0o777)
    assert compiled(twice)(2) == 4
    assert compiled(twice).stats.cache_path is None


def test_no_function_is_kept_by_numbas_own_rules():
    package = Path(penstock.compll.__file__).parents[1]
    found = [path.name for path in package.rglob("*.py") if "cache=True" in path.read_text()]
    assert found == []
