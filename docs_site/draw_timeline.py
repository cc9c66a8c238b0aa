"""Draws the moving timeline of docs/how-it-works.md: one iteration three ways, from the simulator.

`python docs_site/draw_timeline.py` writes docs/pictures/how-it-works.svg; a test draws it again and compares.
"""

from html import escape
from pathlib import Path

from penstock.planning.worth import described_network, described_routes, with_gpus, worth
from penstock.timeline import COMPUTE, Timeline
from penstock.traces import load_shipped

OUT = Path(__file__).parents[1] / "docs" / "pictures" / "how-it-works.svg"
WIDTH, LEFT, ROW, LOOP = 860, 150, 26, 8.0  # pixels, and seconds that the picture takes to move once
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #33414e } .quiet { fill: #6b7a88; font-size: 11px }
.compute { fill: #6f93b8 } .network { fill: #e08a4a } .line { stroke: #c7d0d8 }
.now { stroke: #b3261e; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #dbe3ea } .quiet { fill: #9aa8b5 } .line { stroke: #45505a } }
@media (prefers-reduced-motion: reduce) { .now { display: none } }
"""


def timelines() -> dict[str, Timeline]:
    """Return an iteration of ResNet-50 on four workers at 10 Gb/s: stock, merged best, and with four bits."""
    network = with_gpus(described_network(4, 10e9, 50e-6))
    found = worth(load_shipped("resnet50"), network, described_routes(on_gpu=True), "sgd")
    plans = {"stock DDP": found.stock, "planned, dense": found.merged, "blocks(bits=4)": found.coded["blocks(bits=4)"]}
    return {name: plan.timeline for name, plan in plans.items() if plan.timeline is not None}


def draw(found: dict[str, Timeline]) -> str:
    """Return the picture; a line moves over it at the speed of the slowest iteration."""
    whole = max(each.iteration_seconds for each in found.values())
    scale = (WIDTH - LEFT - 60) / whole
    height = 30 + len(found) * (2 * ROW + 18)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="one iteration with stock DDP, with planned messages, and compressed">',
        f"<style>{STYLE}</style>",
    ]
    top = 12
    for name, timeline in found.items():
        end = LEFT + scale * timeline.iteration_seconds
        parts.append(f'<text x="0" y="{top + ROW - 6}">{escape(name)}</text>')
        parts.append(f'<text x="0" y="{top + ROW + 12}" class="quiet">computes / sends</text>')
        for span in timeline.spans:
            kind, row = ("compute", 0) if span.lane == COMPUTE else ("network", 1)
            x, wide = LEFT + scale * span.start_seconds, max(1.0, scale * span.seconds - 0.6)
            y = top + row * ROW
            parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW - 6}" rx="1.5"/>')
        parts.append(f'<text x="{end + 6:.1f}" y="{top + ROW + 12}">{1e3 * timeline.iteration_seconds:.0f} ms</text>')
        top += 2 * ROW + 18
    right = LEFT + scale * whole
    parts.append(
        f'<line class="now" x1="{LEFT}" x2="{LEFT}" y1="4" y2="{top - 8}"><animateTransform attributeName="transform" '
        f'type="translate" from="0 0" to="{right - LEFT:.1f} 0" dur="{LOOP:g}s" repeatCount="indefinite"/></line>'
    )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    OUT.write_text(draw(timelines()))
