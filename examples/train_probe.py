"""Train a linear probe on captured rows, and say what it would have scored on labels that mean nothing.

Sentences praise or blame a thing. The probe reads the row of the full stop, which says nothing by itself. The words
it is tested on, adjectives and nouns, do not occur in what it is trained on. The control is the same probe on the
same rows with shuffled labels.

    python examples/train_probe.py
    python examples/train_probe.py --layer 8 --model path-or-hub-id
"""

import argparse

import torch
from torch import Tensor, nn

import midstream as ms

GOOD = ["wonderful", "excellent", "delightful", "superb", "charming", "brilliant", "lovely", "fantastic"]
BAD = ["terrible", "awful", "dreadful", "horrible", "boring", "disgusting", "miserable", "pathetic"]
GOOD_UNSEEN = ["marvellous", "amazing", "pleasant", "magnificent"]
BAD_UNSEEN = ["ugly", "appalling", "unpleasant", "dismal"]
NOUNS = ["film", "meal", "hotel", "book", "concert", "garden"]
NOUNS_UNSEEN = ["song", "journey", "teacher"]


def sentences(good: list[str], bad: list[str], nouns: list[str]) -> tuple[list[str], Tensor]:
    """Every noun with every adjective, and 1.0 for praise, 0.0 for blame."""
    texts = [f"The {noun} was {adjective}." for noun in nouns for adjective in [*good, *bad]]
    labels = torch.tensor([float(adjective in good) for _ in nouns for adjective in [*good, *bad]])
    return texts, labels


def fit(rows: Tensor, labels: Tensor, penalty: float = 0.1) -> nn.Linear:
    """Logistic regression with a squared penalty on the weights."""
    probe = nn.Linear(rows.shape[1], 1)
    nn.init.zeros_(probe.weight)
    nn.init.zeros_(probe.bias)
    optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        fit_loss = nn.functional.binary_cross_entropy_with_logits(probe(rows)[:, 0], labels)
        loss = fit_loss + penalty * probe.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return probe


def accuracy(probe: nn.Linear, rows: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return ((probe(rows)[:, 0] > 0) == labels.bool()).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a linear probe and compare it with a control.")
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id, or smollm2 (bundled)")
    parser.add_argument("--layer", type=int, help="the block to read (default: the middle one, chosen beforehand)")
    parser.add_argument("--small", action="store_true", help="fewer nouns and controls, for a quick look")
    given = parser.parse_args()
    torch.manual_seed(0)

    train_texts, train_labels = sentences(GOOD, BAD, NOUNS[:2] if given.small else NOUNS)
    test_texts, test_labels = sentences(GOOD_UNSEEN, BAD_UNSEEN, NOUNS_UNSEEN)
    with ms.load(given.model) as lm:
        layer = lm.facts.num_layers // 2 if given.layer is None else given.layer
        cap = lm.capture(train_texts + test_texts, layers=[layer], rows="prompt[-1]", dtype="float32")
    stops = {cap.tokens(index)[-1].text for index in range(len(cap))}
    print(f"layer {layer}, rows of the token {', '.join(map(repr, sorted(map(str, stops))))}")

    rows = cap.rows(layer)  # in the order of the prompts: one row each
    train, test = rows[: len(train_texts)], rows[len(train_texts) :]
    mean, scale = train.mean(0), train.std(0) + 1e-6  # of the training rows alone
    train, test = (train - mean) / scale, (test - mean) / scale

    held_out = accuracy(fit(train, train_labels), test, test_labels)
    controls = [
        accuracy(fit(train, train_labels[torch.randperm(len(train_labels))]), test, test_labels)
        for _ in range(5 if given.small else 20)
    ]
    print(f"trained on {len(train)} sentences, tested on {len(test)} with other nouns and other adjectives")
    print(f"held-out accuracy: {held_out:.3f}")
    average = sum(controls) / len(controls)
    print(f"shuffled labels:   {average:.3f} (mean of {len(controls)}, the highest {max(controls):.3f})")


if __name__ == "__main__":
    main()
