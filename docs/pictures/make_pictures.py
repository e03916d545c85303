"""Draws the pictures of the concepts page: plain SVG on a light card, so that they read well on
light and dark pages.

python docs/pictures/make_pictures.py
"""

from pathlib import Path

HERE = Path(__file__).parent
INK, GREY, GREEN, RED, BLUE = "#1b1f24", "#6b7480", "#1f7a45", "#c62828", "#1d5fa8"


class Picture:
    """SVG elements on a card."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title, self.parts = (width, height), title, []

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = "",
        fill: str = "#ffffff",
        edge: str = INK,
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{edge}" stroke-width="1.4"{dash}/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 5, text, "middle", edge if edge != INK else INK)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        colour: str = INK,
        size: int = 14,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"{weight}>{text}</text>'
        )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = INK, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        name = {INK: "ink", GREY: "grey", GREEN: "green", RED: "red", BLUE: "blue"}[colour]
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1.6"{dash} marker-end="url(#{name})"/>'
        )

    def save(self, name: str) -> None:
        (w, h) = self.size
        colours = (("ink", INK), ("grey", GREY), ("green", GREEN), ("red", RED), ("blue", BLUE))
        heads = "".join(
            f'<marker id="{n}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0 0L10 5L0 10z" fill="{c}"/></marker>'
            for n, c in colours
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" font-family="system-ui, sans-serif">'
        card = f'<rect width="{w}" height="{h}" rx="10" fill="#f7f8fa"/>'
        body = "\n".join(
            [
                head,
                f"<title>{self.title}</title>",
                f"<defs>{heads}</defs>",
                card,
                *self.parts,
                "</svg>",
                "",
            ]
        )
        (HERE / name).write_text(body, encoding="utf-8")


def draw_memory() -> None:
    """BPTT keeps every step; a trace is carried forward."""
    p = Picture(760, 330, "BPTT keeps every step, a trace is carried forward")
    p.text(20, 30, "Backpropagation through time: every step is kept until the end", bold=True)
    for n in range(5):
        x = 30 + 140 * n
        p.box(x, 50, 90, 40, f"step {n + 1}" if n < 4 else "step T", "#fdecea", RED)
        if n < 4:
            p.arrow(x + 90, 62, x + 140, 62)
            p.arrow(x + 140, 80, x + 90, 80, RED)
    p.text(30, 118, "black: forward, first to last", colour=GREY, size=13)
    p.text(
        300,
        118,
        "red: credit walks back, last to first; red boxes: kept in memory",
        colour=RED,
        size=13,
    )
    p.text(20, 172, "Online: what the past contributed travels along, in the trace", bold=True)
    for n in range(5):
        x, last = 30 + 140 * n, n == 4
        p.box(
            x,
            192,
            90,
            40,
            f"step {n + 1}" if not last else "step T",
            "#e8f5ec" if last else "#ffffff",
            GREEN if last else GREY,
            not last,
        )
        p.box(
            x,
            250,
            90,
            34,
            f"trace {n + 1}" if not last else "trace T",
            "#e8f5ec" if last else "#ffffff",
            GREEN if last else GREY,
            not last,
        )
        if not last:
            p.arrow(x + 90, 212, x + 140, 212)
            p.arrow(x + 90, 267, x + 140, 267, GREEN)
        p.arrow(x + 45, 232, x + 45, 250, GREEN)
    p.text(30, 310, "dashed: gone", colour=GREY, size=13)
    p.text(300, 310, "green: kept; a gradient is there at every step", colour=GREEN, size=13)
    p.save("memory.svg")


def draw_dropped() -> None:
    """What D-RTRL follows and what it drops."""
    p = Picture(760, 360, "What D-RTRL follows and what it drops")
    p.text(150, 32, "step t-1", "middle", bold=True)
    p.text(560, 32, "step t", "middle", bold=True)
    for n, y in ((1, 60), (2, 170)):
        p.box(80, y, 140, 44, f"unit {n} of the state")
        p.box(490, y, 140, 44, f"unit {n} of the state")
        p.arrow(220, y + 22, 490, y + 22, GREEN)
    p.text(355, 74, "gate, leak: followed", "middle", GREEN)
    p.text(355, 212, "gate, leak: followed", "middle", GREEN)
    p.arrow(220, 92, 490, 180, RED, True)
    p.arrow(220, 182, 490, 94, RED, True)
    p.text(355, 117, "W_hh", "middle", RED)
    p.text(502, 146, "product with a weight: a cut", colour=RED, size=13)
    p.box(80, 270, 140, 44, "input x_t", "#eaf1fb", BLUE)
    p.arrow(220, 286, 490, 208, BLUE)
    p.text(300, 298, "W_ih: the contact, where its trace begins", colour=BLUE)
    p.text(
        30,
        342,
        "With nothing red in the model, D-RTRL is exact. The report lists every red arrow, by "
        "torch name and line.",
        size=13,
        colour=GREY,
    )
    p.save("dropped.svg")


def draw_stack() -> None:
    """Credit that crosses layers through time."""
    p = Picture(760, 300, "Credit that crosses layers through time")
    for n, x in enumerate((90, 330, 570)):
        name = ("t-2", "t-1", "t")[n]
        p.box(x, 60, 100, 44, f"layer 2, {name}")
        p.box(x, 190, 100, 44, f"layer 1, {name}")
        p.arrow(x + 50, 190, x + 50, 104, INK)
    for y in (82, 212):
        p.arrow(190, y, 330, y, GREEN)
        p.arrow(430, y, 570, y, GREEN)
    p.box(680, 60, 60, 44, "loss", "#fff6df", "#8a6100")
    p.arrow(670, 82, 680, 82)
    p.text(30, 30, "Green: followed by traces, each layer along its own time.", colour=GREEN)
    p.arrow(366, 186, 366, 108, RED, True)
    p.arrow(430, 94, 570, 94, RED, True)
    p.text(
        30,
        270,
        "Red: from layer 1 at t-1 up into layer 2 at t-1, and then along layer 2's time to the "
        "loss at t. D-RTRL drops it,",
        colour=RED,
        size=13,
    )
    p.text(
        30,
        288,
        "RTRL keeps it, and inside a chunk credit='chunk' keeps it too.",
        colour=RED,
        size=13,
    )
    p.save("stack.svg")


if __name__ == "__main__":
    draw_memory()
    draw_dropped()
    draw_stack()
