"""Draws docs/pictures/window.svg: three blocks over twelve calls, from the same schedule that the optimizer runs."""

from pathlib import Path

from stallfree.engine.schedule import BlockSchedule, Clock

CALLS, INTERVAL, LAG, PHASES = 12, 4, 1, (0, 1, 2)
WIDTH, ROW, LEFT, TOP = 58, 74, 110, 48
COLLECT, REPLAY, PUBLISH, TEXT = "#8fb8de", "#e8a33d", "#3f8f5f", "#333333"


def box(x: float, y: float, width: float, height: float, color: str, label: str = "") -> str:
    text = (
        f'<text x="{x + width / 2}" y="{y + height / 2 + 4}" text-anchor="middle" fill="white">{label}</text>' if label else ""
    )
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{color}"/>{text}'


def draw() -> str:
    parts = []
    for call in range(1, CALLS + 1):
        x = LEFT + (call - 1) * WIDTH
        parts.append(f'<text x="{x + WIDTH / 2}" y="{TOP - 14}" text-anchor="middle" fill="{TEXT}">{call}</text>')
        parts.append(f'<line x1="{x}" y1="{TOP - 6}" x2="{x}" y2="{TOP + ROW * len(PHASES)}" stroke="#dddddd"/>')
    parts.append(f'<text x="{LEFT - 12}" y="{TOP - 14}" text-anchor="end" fill="{TEXT}">call</text>')
    for row, phase in enumerate(PHASES):
        y = TOP + row * ROW
        parts.append(f'<text x="{LEFT - 12}" y="{y + 24}" text-anchor="end" fill="{TEXT}">block {"ABC"[row]}</text>')
        clock, schedule = Clock(INTERVAL, warm_up=0), BlockSchedule(phase, interval=INTERVAL)
        for call in range(1, CALLS + 1):
            clock.call = call
            x = LEFT + (call - 1) * WIDTH
            parts.append(box(x + 3, y + 8, WIDTH - 6, 22, COLLECT, f"g{call}"))
            if schedule.closes(clock):
                due = schedule.close(clock, LAG)
                if due <= CALLS:
                    parts.append(box(x + WIDTH * 0.98, y + 34, WIDTH * LAG * 0.92, 18, REPLAY, "replay"))
                    parts.append(f'<circle cx="{LEFT + due * WIDTH - 4}" cy="{y + 43}" r="6" fill="{PUBLISH}"/>')
    bottom = TOP + ROW * len(PHASES) + 18
    legend = (
        (COLLECT, "gradient collected in a slot (deferred channels)"),
        (REPLAY, "host: one AdamW step per gradient"),
        (PUBLISH, "published"),
    )
    x = float(LEFT)
    for color, label in legend:
        parts.append(f'<rect x="{x}" y="{bottom - 10}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="{bottom}" fill="{TEXT}">{label}</text>')
        x += 34 + 6.6 * len(label)
    width, height = LEFT + CALLS * WIDTH + 20, bottom + 16
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    (Path(__file__).parent / "window.svg").write_text(draw(), encoding="utf-8")
