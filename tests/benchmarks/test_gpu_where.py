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
from penstock.runtime.device.messages import GroupedMessages  # noqa: E402
from penstock.runtime.device.queued import prepare_queued  # noqa: E402
from penstock.strategies import Options, build_compressed  # noqa: E402


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
    """Return the messages of a bucket, and how many groups of them were noted."""
    codec = make_codec("onebit", defers_nonfinite_check=True)
    messages = kind(Group())
    messages.noted = []
    program, batches = build_compressed("parameter_server", 3, [0, 9000], Options(block_numel=9000))
    ready = prepare_queued(program, 0, codec, codec.on_device(torch.device("cpu")), batches, messages)
    with pytest.MonkeyPatch.context() as patch, gpu_where.without_kernels(wanted=False):
        patch.setattr(gpu_where, "event", lambda: 0.0)
        ready.run(torch.zeros(9000))
        messages.land()
    return messages._group.asked, len(messages.noted)


def test_watched_messages_are_those_that_are_sent_otherwise_and_none_are_where_none_should_be():
    sent, _ = asked_for(GroupedMessages)
    watched, groups = asked_for(gpu_where.WatchedMessages)
    assert watched == sent
    assert len(sent) == 2 * 4  # two rounds, to and from two others
    assert groups == 3  # two rounds, and the kernels behind them
    assert asked_for(gpu_where.NoMessages)[0] == []
