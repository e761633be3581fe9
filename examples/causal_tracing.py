"""Causal tracing: which token's row, at which layer, decides what the model answers.

Two prompts differ in one word, and so do their answers: "The capital city of France is called" (clean) and "The
capital city of Italy is called" (corrupted). The corrupted prompt is run with one of its rows replaced by the clean
run's: one token's, as one block leaves it (`ms.patch` at resid_post, one row for one row). With
d = log p(" Paris") − log p(" Rome"),

    effect = (d(patched) − d(corrupted)) / (d(clean) − d(corrupted))

is 0 where the row changes nothing, and 1 where this row alone brings the clean answer back. In the bundled model that
is the country's row up to layer 22, and from layer 23 on the last token's, which the answer is read from: one block
moves nearly all of it. Columns before the country are the control: both runs have the same rows there.

All patches, of every layer, token and pair, go through one `lm.score`: each prompt of a batch has its own steering.
Facts that the model does not know (its most likely next word is another one) are left out, and named.

    python examples/causal_tracing.py                  # writes causal_tracing.html and .png into demo/
    python examples/causal_tracing.py --model path-or-hub-id --out folder
"""

import argparse
from html import escape
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import midstream as ms
from midstream.web.page_style import STYLE
from midstream.web.tokens import visible

TEMPLATE = "The capital city of {} is called"
FACTS = {
    "France": "Paris",
    "Italy": "Rome",
    "Germany": "Berlin",
    "England": "London",
    "Japan": "Tokyo",
    "Russia": "Moscow",
    "Spain": "Madrid",
    "China": "Beijing",
}
ALIKE = 0.05  # the table leaves out layers whose effects are this close to the line before; the pictures have all


def known_facts(lm: ms.LanguageModel, facts: dict[str, str]) -> dict[str, int]:
    """Country → the token that its capital begins with, of the facts that the model answers greedily."""
    prompts = [TEMPLATE.format(country) for country in facts]
    known: dict[str, int] = {}
    length = 0
    for (country, capital), answer in zip(facts.items(), lm.generate(prompts, max_tokens=1), strict=True):
        expected = lm.tokenizer(f" {capital}", add_special_tokens=False)["input_ids"][0]
        right = answer.token_ids[0] == expected
        length = length or (len(answer.prompt_token_ids) if right else 0)
        same = len(answer.prompt_token_ids) == length  # rows are paired by position
        why = "" if right and same else f"   left out: {'another number of tokens' if right else 'not known'}"
        print(f"  {TEMPLATE.format(country)!r:42} → {answer.text!r}{why}")
        if not why:
            known[country] = expected
    return known


def log_odds(
    lm: ms.LanguageModel, prompts: list[str], clean: list[int], corrupted: list[int], steering: list | None = None
) -> np.ndarray:
    """d of each prompt: how much likelier its clean answer is than its corrupted one, in nats."""
    references = [[token] for token in [*clean, *corrupted]]
    both = lm.score(prompts * 2, references, steering=None if steering is None else steering * 2)
    return (both[: len(prompts), 0] - both[len(prompts) :, 0]).double().numpy()


def trace(lm: ms.LanguageModel, pairs: list[tuple[str, str]], answers: dict[str, int], layers: list[int]) -> np.ndarray:
    """The effect of each patch, `[pairs, layers, positions]`; pairs are (clean, corrupted) countries."""
    clean, corrupted = ([TEMPLATE.format(pair[side]) for pair in pairs] for side in (0, 1))
    good, bad = ([answers[pair[side]] for pair in pairs] for side in (0, 1))
    ends = log_odds(lm, clean + corrupted, good * 2, bad * 2)
    best, worst = ends[: len(pairs), None, None], ends[len(pairs) :, None, None]

    cap = lm.capture(clean, layers=layers)  # every row of the clean prompts
    positions = len(cap.outputs[0].prompt_token_ids)
    places = [(pair, layer, at) for pair in range(len(pairs)) for layer in layers for at in range(positions)]
    patches = [
        ms.patch(cap, sample=pair, layers=[layer], source=f"prompt[{at}]", target=f"prompt[{at}]")
        for pair, layer, at in places
    ]
    of = [pair for pair, _, _ in places]
    patched = log_odds(lm, [corrupted[pair] for pair in of], [good[i] for i in of], [bad[i] for i in of], patches)
    return (patched.reshape(len(pairs), len(layers), positions) - worst) / (best - worst)


def heads_of(lm: ms.LanguageModel, pair: tuple[str, str]) -> list[str]:
    """What stands over the columns: the tokens of the prompts, both where they differ."""
    texts = [
        [visible(lm.tokenizer.decode([token])) for token in lm.prepare(TEMPLATE.format(country))[0].token_ids]
        for country in pair
    ]
    return [one if one == other else f"{one}/{other.lstrip('·')}" for one, other in zip(*texts, strict=True)]


def print_table(effects: np.ndarray, heads: list[str], layers: list[int]) -> None:
    """Effects `[layers, positions]`, a line for each layer that differs from the line before."""
    width = max(8, *map(len, heads)) + 2
    print("layer " + "".join(f"{head:>{width}}" for head in heads))
    shown = 0
    for place, row in enumerate(effects):
        if place in (0, len(effects) - 1) or np.abs(row - effects[shown]).max() > ALIKE:
            print(f"{layers[place]:5d} " + "".join(f"{effect:{width}.2f}" for effect in row))
            shown = place


# --- pictures


def colour(effect: float) -> str:
    """The page's class for an effect: blue below 0, grey at 0, full orange from 1 on."""
    step = round(9 * min(max(effect, -1.0), 1.0))
    return "m" if step == 0 else f"{'h' if step > 0 else 'l'}{abs(step)}"


def html_table(title: str, effects: np.ndarray, heads: list[str], layers: list[int]) -> str:
    """Layers × tokens, coloured; the numbers stand in the cells."""
    head = "".join(f'<th scope="col"><span>{escape(text)}</span></th>' for text in heads)
    lines = [
        f'<tr><th scope="row">{layer}</th>'
        + "".join(f'<td class="{colour(effect)}">{effect:.2f}</td>' for effect in row)
        + "</tr>"
        for layer, row in zip(layers, effects.tolist(), strict=True)
    ]
    return f"""<section><h2>{escape(title)}</h2>
<div class="scroll"><table><thead><tr><th scope="col">layer</th>{head}</tr></thead>
<tbody>
{chr(10).join(lines)}
</tbody></table></div></section>"""


def write_page(path: Path, title: str, tables: list[str]) -> None:
    """One self-contained page, in the style of midstream's heat maps."""
    swatches = "".join(f'<i class="{colour(step / 9)}"></i>' for step in range(-9, 10))
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body class="numbers">
<header>
<h1>{escape(title)}</h1>
<p>Each cell: the corrupted prompt was run with this token's row, as this layer leaves it, from the clean run. 0 changes
nothing; 1 brings the clean answer back, as far as the log-odds of the two answers go.</p>
<div class="legend"><div class="scale"><div class="bar" aria-hidden="true">{swatches}</div>
<div class="ticks"><span>&minus;1 or less</span><span>0</span><span>1 or more</span></div></div></div>
</header>
<main>
{chr(10).join(tables)}
</main>
</body>
</html>
"""
    path.write_text(page, encoding="utf-8")


def write_png(path: Path, title: str, effects: np.ndarray, heads: list[str], layers: list[int]) -> None:
    """The table of the mean as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.2 + 0.75 * len(heads), 1.8 + 0.2 * len(layers)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("effects", ["#2166ac", "#f7f6f4", "#d9590b"])
    image = axes.imshow(effects, aspect="auto", cmap=colours, vmin=-1, vmax=1, interpolation="nearest")
    axes.set_xticks(range(len(heads)), heads, rotation=30, ha="right", parse_math=False)
    axes.set_yticks(range(len(layers)), list(map(str, layers)))
    axes.tick_params(length=0, labelsize=7)
    axes.set_ylabel("layer of the patched row (resid_post)", fontsize=8)
    axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    bar = figure.colorbar(image, ax=axes, shrink=0.6)
    bar.set_label("effect: 1 brings the clean answer back", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Patch rows of one run into another, and see which decide the answer.")
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id, or smollm2 (bundled)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the folder of the pictures (default: demo)")
    parser.add_argument("--small", action="store_true", help="two pairs and every fifth layer, for a quick look")
    given = parser.parse_args()

    with ms.load(given.model, dtype="float32") as lm:
        print("what the model answers:")
        answers = known_facts(lm, dict(list(FACTS.items())[:2]) if given.small else FACTS)
        if len(answers) < 2:
            raise SystemExit("fewer than two of these facts are known to this model: there is no pair to patch")
        names = list(answers)
        pairs = list(zip(names, names[1:] + names[:1], strict=True))  # each is clean once, and corrupted once
        last = lm.facts.num_layers - 1
        layers = sorted({*range(0, last, 5), last}) if given.small else list(range(last + 1))
        effects = trace(lm, pairs, answers, layers)
        columns = [heads_of(lm, pair) for pair in pairs]

    subject = next(at for at, head in enumerate(columns[0]) if "/" in head)
    heads = [*columns[0][:subject], "(country)", *columns[0][subject + 1 :]]
    mean = effects.mean(0)
    print(f"\n{effects.size} patches; mean effect over {len(pairs)} pairs (1: the clean answer is back)")
    print_table(mean, heads, layers)
    later = [layer for layer, row in zip(layers, mean, strict=True) if row[-1] > row[subject]]
    where = f"from layer {later[0]} on" if later else "nowhere"
    print(f"the last token's row has more effect than the country's {where}")
    print(f"control, columns before the country: at most {np.abs(effects[:, :, :subject]).max():.5f}")

    given.out.mkdir(parents=True, exist_ok=True)
    title = f"Causal tracing in {given.model}: {TEMPLATE.format('…')}"
    tables = [html_table(f"Mean of {len(pairs)} pairs", mean, heads, layers)]
    for (clean, corrupted), one, own in zip(pairs, effects, columns, strict=True):
        tables.append(html_table(f"{clean} into {corrupted}", one, own, layers))
    write_page(given.out / "causal_tracing.html", title, tables)
    print(f"wrote {given.out / 'causal_tracing.html'}")
    if find_spec("matplotlib") is None:
        print("no causal_tracing.png, which needs matplotlib; type: pip install 'midstream[demo]'")
    else:
        write_png(given.out / "causal_tracing.png", title, mean, heads, layers)
        print(f"wrote {given.out / 'causal_tracing.png'}")


if __name__ == "__main__":
    main()
