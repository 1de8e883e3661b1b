"""The timeline of a run as one SVG: lanes above one another over the same time, with the faults behind them all.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart; nothing is told by colour alone.
Long runs are drawn in at most BUCKETS steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from tests.jepsen.report.timeline import FaultSpan, State, Timeline

WIDTH, LEFT, RIGHT = 1240, 150, 20
PLOT = WIDTH - LEFT - RIGHT
BUCKETS = 600
CURVE_HEIGHT, STRIP_HEIGHT, LANE_GAP, TITLE_HEIGHT = 74, 15, 18, 16
BLUE, GREEN, ORANGE, VERMILLION, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#009E73",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
)
LINES = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY, "#000000")
LEADERS = (SKY, YELLOW, "#8fd3b8", PURPLE, "#bbbbbb")
ISR_FULL, ISR_LESS, ISR_ONE = "#e4ecf1", ORANGE, VERMILLION
MIN_BAR = 2.0  # so that a short one is seen

Points = Sequence[tuple[float, float]]


class Drawing:
    """Lanes, from top to bottom."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._parts: list[str] = []
        self._y = 8.0

    def x(self, t: float) -> float:
        return LEFT + PLOT * min(max(t / self._seconds, 0.0), 1.0)

    def lane(self, title: str) -> None:
        self._y += LANE_GAP
        self._text(LEFT, self._y, title, "title")
        self._y += TITLE_HEIGHT - 8

    # ---- lanes

    def bars(self, label: str, spans: Iterable[tuple[float, float, str, str, str]]) -> None:
        """One row of (begin, end, text, what it is, colour)."""
        y, height = self._y, STRIP_HEIGHT
        self._text(LEFT - 8, y + 11, label, "label")
        for begin, end, text, what, colour in spans:
            x, width = self.x(begin), max(self.x(end) - self.x(begin), MIN_BAR)
            self._parts.append(
                f'<g><title>{escape(what)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{height - 2}" fill="{colour}"/>'
            )
            if text and width > 7 * len(text):
                self._text(x + 3, y + 10.5, text, "inside")
            self._parts.append("</g>")
        self._y += height

    def curves(self, lines: Mapping[str, Points], unit: str, *, filled: bool = False) -> None:
        """Curves in one frame, with their names and the highest value."""
        top, height = self._y, max(CURVE_HEIGHT, 30 + 12 * len(lines))
        highest = max((value for points in lines.values() for _, value in points), default=0.0) or 1.0
        self._parts.append(f'<rect x="{LEFT}" y="{top:.1f}" width="{PLOT}" height="{height}" class="frame"/>')
        self._text(LEFT - 8, top + 10, f"{highest:,.0f} {unit}", "label")
        self._text(LEFT - 8, top + height, "0", "label")
        for n, (name, points) in enumerate(lines.items()):
            colour = LINES[n % len(LINES)]
            dash = ("", "6 3", "2 3", "8 3 2 3")[n // 2 % 4] if len(lines) > 1 else ""
            where = [f"{self.x(t):.1f},{top + height * (1 - value / highest):.1f}" for t, value in points]
            if where:
                if filled and n == 0:
                    first, last = self.x(points[0][0]), self.x(points[-1][0])
                    area = f"{first:.1f},{top + height:.1f} {' '.join(where)} {last:.1f},{top + height:.1f}"
                    self._parts.append(f'<polygon points="{area}" fill="{colour}" opacity="0.25"/>')
                self._parts.append(
                    f'<polyline points="{" ".join(where)}" class="line" stroke="{colour}" stroke-dasharray="{dash}"/>'
                )
            self._text(LEFT - 8, top + 24 + 12 * n, name, "label", colour)
        self._y = top + height + 4

    def axis(self) -> None:
        """Seconds, or minutes in a long run, below the last lane."""
        step = next((s for s in (1, 5, 10, 30, 60, 300, 600, 1800, 3600) if self._seconds / s <= 20), 7200)
        self._y += 6
        for n in range(int(self._seconds / step) + 1):
            t = n * step
            self._parts.append(
                f'<line x1="{self.x(t):.1f}" x2="{self.x(t):.1f}" y1="8" y2="{self._y:.1f}" class="grid"/>'
            )
            self._text(self.x(t), self._y + 12, f"{t // 60}:{t % 60:02d}" if step >= 30 else f"{t} s", "tick")
        self._y += 18

    def shades(self, faults: Iterable[FaultSpan]) -> str:
        """Behind all lanes, the time in which anything was broken."""
        shades = []
        for fault in faults:
            begin, end = fault.begin, self._seconds if fault.end is None else fault.end
            x, width = self.x(begin), max(self.x(end) - self.x(begin), 1.0)
            shades.append(f'<rect x="{x:.1f}" y="8" width="{width:.1f}" height="{self._y:.1f}" class="shade"/>')
        return "".join(shades)

    def svg(self, faults: Iterable[FaultSpan]) -> str:
        shades = self.shades(faults)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._y + 6:.0f}" role="img" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="11"><style>{SVG_STYLE}</style>'
            f'<rect width="{WIDTH}" height="{self._y + 6:.0f}" fill="#fff"/>{shades}{"".join(self._parts)}</svg>'
        )

    def _text(self, x: float, y: float, text: str, kind: str, colour: str = "") -> None:
        fill = f' style="fill:{colour}"' if colour else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{fill}>{escape(text)}</text>')


SVG_STYLE = (
    ".title{font-weight:bold;font-size:12px}.label{text-anchor:end;fill:#333}.tick{text-anchor:middle;fill:#333}"
    ".inside{fill:#000}.frame{fill:none;stroke:#999;stroke-width:.5}.line{fill:none;stroke-width:1.5}"
    ".grid{stroke:#999;stroke-width:.4;stroke-dasharray:1 4}.shade{fill:#000;opacity:.05}"
)


def buckets(seconds: float, counts: Mapping[int, int]) -> list[tuple[float, float]]:
    """Rates per second over the whole run, zeros included, in at most BUCKETS steps."""
    step = max(1, -(-int(seconds) // BUCKETS))
    return [
        (float(t), sum(counts.get(second, 0) for second in range(t, t + step)) / step)
        for t in range(0, int(seconds) + 1, step)
    ]


def thinned(points: Points) -> Points:
    """At most BUCKETS of them, of each step the highest: a peak has to be seen."""
    step = -(-len(points) // BUCKETS)
    return [max(points[n : n + step], key=lambda point: point[1]) for n in range(0, len(points), max(step, 1))]


def draw(line: Timeline, gaps: Mapping[str, Points], unseen: Mapping[str, Points]) -> str:
    """`gaps`: (begin, seconds) by partition; `unseen`: messages by channel."""
    seconds = line.seconds
    drawing = Drawing(seconds)
    _draw_faults(drawing, line)
    drawing.lane("Publishes: messages OK'd a second, and messages that were refused or of unknown outcome")
    drawing.curves({"OK": buckets(seconds, line.oks), "not OK": buckets(seconds, line.unknown)}, "/s", filled=True)
    _draw_gaps(drawing, gaps)
    drawing.lane("Deliveries a second, and those of a message that its channel had delivered before")
    drawing.curves(
        {"all": buckets(seconds, line.deliveries), "again": buckets(seconds, line.repeated)}, "/s", filled=True
    )
    if unseen:
        drawing.lane("OK'd and not delivered yet")
        drawing.curves({name: thinned(points) for name, points in unseen.items()}, "msgs")
    if line.partitions:
        _draw_partitions(drawing, line)
    if line.memory:
        drawing.lane("Resident memory")
        drawing.curves({name: thinned(points) for name, points in sorted(line.memory.items())}, "MiB")
        drawing.lane("Open descriptors")
        drawing.curves({name: thinned(points) for name, points in sorted(line.descriptors.items())}, "")
    drawing.axis()
    return drawing.svg(line.faults)


def _draw_faults(drawing: Drawing, line: Timeline) -> None:
    drawing.lane("Faults, from injection to healing")
    rows: dict[str, list[FaultSpan]] = {}
    for fault in line.faults:
        rows.setdefault(fault.fault, []).append(fault)
    for kind, faults in sorted(rows.items()):
        drawing.bars(
            kind,
            [
                (
                    each.begin,
                    line.seconds if each.end is None else each.end,
                    each.what if each.bit else f"VOID {each.what}",
                    f"{each.what}; {each.proof or 'not healed'}",
                    VERMILLION if each.bit else "#bbbbbb",
                )
                for each in faults
            ],
        )
    if line.moves:
        drawing.bars("operators", [(t, t, "", what, BLUE) for t, what in line.moves])


def _draw_gaps(drawing: Drawing, gaps: Mapping[str, Points]) -> None:
    drawing.lane("Time without an OK, of 0.25 s or more, by partition")
    for name, found in sorted(gaps.items()):
        bars = [
            (t, t + s, f"{s:.1f} s", f"{name}: {s:.2f} s without an OK from {t:.2f} s on", "#888") for t, s in found
        ]
        drawing.bars(name, bars)


def _draw_partitions(drawing: Drawing, line: Timeline) -> None:
    names = sorted({state.leader for states in line.partitions.values() for state in states})
    colours = {name: LEADERS[n % len(LEADERS)] for n, name in enumerate(names)}
    drawing.lane("Leaders: who leads each partition, with the epoch")
    for (topic, number), states in sorted(line.partitions.items()):
        drawing.bars(
            f"{topic}/{number}",
            runs(
                states,
                line.seconds,
                key=lambda state: (state.leader, state.epoch),
                text=lambda state: f"{state.leader} e{state.epoch}",
                colour=lambda state: colours[state.leader],
            ),
        )
    drawing.lane("In-sync replicas of each partition")
    for (topic, number), states in sorted(line.partitions.items()):
        drawing.bars(
            f"{topic}/{number}",
            runs(
                states,
                line.seconds,
                key=lambda state: state.isr,
                text=lambda state: f"{state.isr} of {state.replicas}",
                colour=isr_colour,
            ),
        )


def isr_colour(state: State) -> str:
    return ISR_FULL if state.isr >= state.replicas else ISR_LESS if state.isr > 1 else ISR_ONE


def runs(
    states: Sequence[State],
    end: float,
    *,
    key: Callable[[State], object],
    text: Callable[[State], str],
    colour: Callable[[State], str],
) -> list[tuple[float, float, str, str, str]]:
    """Bars of successive states that have the same key."""
    bars: list[tuple[float, float, str, str, str]] = []
    begin: State | None = None
    for state in states:
        if begin is None or key(state) != key(begin):
            if begin is not None:
                bars.append((begin.t, state.t, text(begin), f"{text(begin)} from {begin.t:.1f} s on", colour(begin)))
            begin = state
    if begin is not None:
        bars.append((begin.t, end, text(begin), f"{text(begin)} from {begin.t:.1f} s on", colour(begin)))
    return bars
