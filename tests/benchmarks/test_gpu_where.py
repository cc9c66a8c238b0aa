"""The study of where time goes on GPU ranks: what it leaves out, and that what it watches does the same work."""

import os
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("host memory is the device here", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton", reason="install penstock[gpu] to test codecs on a device")

import gpu_where  # noqa: E402
from penstock.codecs.registry import make_codec  # noqa: E402
from penstock.planning import decide  # noqa: E402
from penstock.runtime import communicator  # noqa: E402
from penstock.runtime.device.messages import GroupedMessages  # noqa: E402
from penstock.runtime.device.queued import prepare_waves  # noqa: E402
from penstock.runtime.request import numel_of_a_wave  # noqa: E402
from penstock.strategies import Options, build_waves  # noqa: E402


class Group:
    """A process group that starts nothing and notes what it is asked for."""

    def __init__(self):
        self.asked = []

    def _get_backend(self, device):
        return SimpleNamespace(supports_coalescing=False)

    def send(self, memory, peer, tag):
        return self._note("send", memory, peer)

    recv = send

    def _note(self, kind, memory, peer):
        self.asked.append((memory[0].nbytes, peer))
        return SimpleNamespace(wait=lambda: None)


def asked_for(kind):
    """Return the messages of a bucket in waves, and how many groups of them were noted."""
    codec = make_codec("onebit", defers_nonfinite_check=True)
    messages = kind(Group())
    messages.noted = []
    waves = build_waves("parameter_server", 3, [0, 9000], Options(block_numel=1, partitions=6))
    ready = prepare_waves(waves, 0, codec, codec.on_device(torch.device("cpu")), messages)
    with pytest.MonkeyPatch.context() as patch, gpu_where.without_kernels(wanted=False):
        patch.setattr(gpu_where, "event", lambda: 0.0)
        ready.run(torch.zeros(9000))
        messages.land()
    return messages._group.asked, len(messages.noted), len(waves)


def test_watched_messages_are_those_that_are_sent_otherwise_and_none_are_where_none_should_be():
    sent, _, waves = asked_for(GroupedMessages)
    watched, groups, _ = asked_for(gpu_where.WatchedMessages)
    assert watched == sent
    assert len(sent) == waves * 2 * 4  # two rounds, to and from two others
    assert groups == waves + 2  # one more round, and the kernels behind it
    assert asked_for(gpu_where.NoMessages)[0] == []


def test_waves_are_as_large_as_a_row_says_and_as_they_ship_otherwise():
    codec = make_codec("onebit")
    with gpu_where.waves_of(16):
        assert {module.numel_of_a_wave(codec, 1) for module in (communicator, decide)} == {4_000_000}
    with gpu_where.waves_of(None):
        assert communicator.numel_of_a_wave is decide.numel_of_a_wave is numel_of_a_wave
