"""Chart of what each technique saved: bars with their uncertainty."""

from matplotlib.axes import Axes

from schemas.timeline import Savings

CLEAR_COLOUR, UNCLEAR_COLOUR = "#2f855a", "#b8bec6"
BAR_IN = 0.3
"""Height of a bar with its distance to the next."""
MARGINS_IN = 1.1
"""Above and below all bars: title and axis."""


def chart_height_in(savings: Savings | None) -> float:
    """0 where there is nothing to show."""
    return MARGINS_IN + BAR_IN * len(savings.each) if savings and savings.each else 0.0


def draw_savings(axes: Axes, savings: Savings) -> None:
    """A bar for each technique, grey where it cannot be told from none."""
    places = range(len(savings.each))
    axes.barh(
        places,
        [saving.saved_s for saving in savings.each],
        height=0.6,
        color=[CLEAR_COLOUR if saving.clear else UNCLEAR_COLOUR for saving in savings.each],
        xerr=[saving.uncertainty_s for saving in savings.each],
        ecolor="0.2",
        capsize=3.0,
    )
    words = [f"{s.technique}  {s.saved_s:+.2f} s" for s in savings.each]
    axes.set_yticks(list(places), words, fontsize=9)
    axes.tick_params(left=False)
    axes.set_ylim(len(savings.each) - 0.5, -0.5)
    axes.axvline(0.0, color="0.2", linewidth=0.8)
    axes.set_xlabel(
        f"seconds of a rollout of {savings.measured_s:.2f} s; grey: not distinguishable from none",
        fontsize=9,
    )
    axes.set_title("saved: predicted without it, minus measured", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
