"""Messages that share their cores with computation: while gradients are computed they take `slowdown` times as long.

A message has a clock of its own, on which it takes as long as where nothing computes. With T the end of the backward
pass and s the slowdown, that clock shows T - (T - t) / s at a moment t before T, and t from then on. It is the same for
all messages, so an iteration with a slowdown is one without on this clock, translated back. An iteration never ends
before T, from where the clocks agree: its length needs no translation.

    s = 2; gradients ready at 2 and 4 (T = 4), each a message of 2 s

    messages' clock        a at 3:  |a a|b b|        to 7
    everybody's            a at 2:  |a a a|b b|      to 7: a's first second takes two, its next is after T
"""

from dataclasses import replace

from penstock.timeline import Span, Timeline
from penstock.trace import Tensor, Trace


def squeezed(trace: Trace, slowdown: float) -> Trace:
    """Return the trace on the messages' clock: the backward pass is shorter, its end stays where it is."""
    assert slowdown >= 1
    if slowdown == 1:
        return trace
    tensors = tuple(Tensor(each.name, each.numel, each.backward_seconds / slowdown) for each in trace.tensors)
    later = trace.backward_seconds * (1 - 1 / slowdown)
    return replace(trace, forward_seconds=trace.forward_seconds + later, tensors=tensors)


def stretched(timeline: Timeline, slowdown: float) -> Timeline:
    """Return a timeline of the messages' clock on everybody's."""
    if slowdown == 1:
        return timeline
    end = timeline.compute_seconds

    def moment(seconds: float) -> float:
        """The forward pass begins at 0 on either clock; nothing else was before it."""
        return seconds if seconds >= end else max(0.0, end - (end - seconds) * slowdown)

    return Timeline(
        tuple(_moved(span, moment(span.start_seconds), moment(span.end_seconds)) for span in timeline.spans)
    )


def _moved(span: Span, start_seconds: float, end_seconds: float) -> Span:
    return replace(span, start_seconds=start_seconds, end_seconds=end_seconds)
