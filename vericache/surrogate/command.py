"""``vericache surrogate``: train a surrogate for a model, and measure it on texts it was not trained on."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vericache.demo import model as bundled
from vericache.demo import prompts
from vericache.demo.worker import ENVIRONMENT
from vericache.errors import ConfigError
from vericache.surrogate import file, report
from vericache.surrogate.fitting import Fitting
from vericache.surrogate.gate import Gates
from vericache.surrogate.mlp import MLP
from vericache.surrogate.ridge import STRENGTH, Ridge
from vericache.surrogate.texts import SHORTEST, Text, cut, hold_out, read


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises VeriCacheError."""
    parser = argparse.ArgumentParser(prog="vericache surrogate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, own_arguments in (("train", train, _train_arguments), ("eval", evaluate, _eval_arguments)):
        sub = commands.add_parser(name, help=(run.__doc__ or "").partition(".")[0], description=run.__doc__)
        sub.set_defaults(run=run)
        own_arguments(sub)
        _source_arguments(sub)
    args = parser.parse_args(list(arguments))
    os.environ.update(ENVIRONMENT)  # vLLM reads it when it is imported: an engine in this process, which can be watched
    code: int = args.run(args, Console())
    return code


def train(args: argparse.Namespace, console: Console) -> int:
    """Train a surrogate for compressor kvzap or fast_kvzip. Every text is scored by KVzip in an engine of this process;
    whole texts are held out to measure the result. Writes FILE, and the figures as JSON beside it."""
    if args.strength <= 0 or not 0 <= args.hold_out < 1:
        raise ConfigError(
            f"expected --strength above 0 and --hold-out in [0, 1), got {args.strength} and {args.hold_out}"
        )
    start, folder = time.monotonic(), _folder(args, console)
    texts = _texts(args, folder, console)
    train_on, held_out = hold_out(texts, args.hold_out)
    fitting, options = _fitting(args)
    from vericache.surrogate.scoring import scores
    from vericache.surrogate.training import measure, take_in

    with scores(str(folder), _longest(texts), _engine(args)) as engine, _progress(console) as progress:
        task = progress.add_task("KVzip scores, tokens", total=sum(t.tokens for t in texts))
        take_in(engine, train_on, fitting, lambda tokens: progress.advance(task, tokens))
        layers = progress.add_task(f"{args.fit}, layers", total=fitting.layers)
        surrogate = fitting.fit(lambda: progress.advance(layers))
        marks = tuple(sorted(t.mark for t in train_on))
        stored = file.Stored(fitting.method, surrogate, engine.fingerprint, options, marks)
        file.save(args.file, stored)
        agreement = measure(engine, surrogate, held_out, lambda tokens: progress.advance(task, tokens))
    about = {
        "surrogate": str(args.file), "method": stored.method, "fingerprint": stored.fingerprint, "options": options,
        "trained_on": [{"name": t.name, "tokens": t.tokens} for t in train_on],
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    trained = f"for compressor {stored.method} ({args.fit}) and model {stored.fingerprint}, on {len(train_on)} texts"
    console.print(f"{args.file}: trained {trained}", soft_wrap=True)
    _finish(report.report(agreement, held_out, **about), args, args.file.with_suffix(".json"), console)
    return 0


def evaluate(args: argparse.Namespace, console: Console) -> int:
    """Measure a surrogate against KVzip. Texts it was trained on are left out."""
    start, stored = time.monotonic(), file.load(args.file)
    folder = _folder(args, console)
    texts = [t for t in _texts(args, folder, console) if t.mark not in stored.trained_on]
    if not texts:
        raise ConfigError(f"{args.file} was trained on all of these texts; give others with --texts")
    from vericache.surrogate.scoring import scores
    from vericache.surrogate.training import measure

    with scores(str(folder), _longest(texts), _engine(args)) as engine, _progress(console) as progress:
        file.check_model(args.file, stored, engine.fingerprint)
        task = progress.add_task("KVzip scores, tokens", total=sum(t.tokens for t in texts))
        agreement = measure(engine, stored.surrogate, texts, lambda tokens: progress.advance(task, tokens))
    about = {
        "surrogate": str(args.file), "method": stored.method, "fingerprint": stored.fingerprint,
        "options": stored.options, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    _finish(report.report(agreement, texts, **about), args, args.file.with_suffix(".eval.json"), console)
    return 0


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", dest="file", type=Path, required=True, metavar="FILE", help="the surrogate's file")
    parser.add_argument(
        "--hold-out", type=float, default=0.25, help="share of the texts to measure with (default 0.25)"
    )
    parser.add_argument(
        "--fit",
        choices=("ridge", "mlp", "gate"),
        default="ridge",
        help="for kvzap: ridge, a linear map, or mlp, one hidden layer; for fast_kvzip: gate",
    )
    parser.add_argument(
        "--strength", type=float, default=STRENGTH, help=f"ridge: weight of the penalty (default {STRENGTH:g})"
    )
    parser.add_argument("--hidden", type=_positive, default=512, help="mlp: width of the hidden layer (default 512)")
    parser.add_argument(
        "--tokens-per-text",
        type=_positive,
        default=2000,
        help="mlp, gate: tokens kept in memory of a piece of text (2000)",
    )


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a surrogate made by `vericache surrogate train`")


def _source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a model folder instead of the bundled model")
    parser.add_argument(
        "--texts", type=Path, nargs="+", help="files and folders of UTF-8 text instead of the bundled prompts"
    )
    parser.add_argument(
        "--tokens", type=_positive, default=3072, help="longer texts are cut into pieces (default 3072)"
    )
    parser.add_argument("--dtype", help="vLLM's dtype (default: float32 for the bundled model, else auto)")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="memory for the KV cache of one text (default 4)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where the figures go (default: beside the surrogate)"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _fitting(args: argparse.Namespace) -> tuple[Fitting, dict[str, Any]]:
    """And the options that go into the file."""
    sampled = {"fit": args.fit, "tokens_per_text": args.tokens_per_text}
    match args.fit:
        case "gate":
            return Gates(args.tokens_per_text), sampled
        case "mlp":
            return MLP(args.hidden, args.tokens_per_text), {**sampled, "hidden": args.hidden}
        case _:
            return Ridge(args.strength), {"fit": args.fit, "strength": args.strength}


def _folder(args: argparse.Namespace, console: Console) -> Path:
    if args.model is None:
        with console.status("preparing the bundled model (once)"):
            return bundled.prepare()
    if not (args.model / "config.json").exists():
        raise ConfigError(f"--model {args.model} is no model folder: it holds no config.json")
    folder: Path = args.model
    return folder


def _texts(args: argparse.Namespace, folder: Path, console: Console) -> list[Text]:
    if args.tokens < SHORTEST:
        raise ConfigError(f"--tokens is {args.tokens}, expected at least {SHORTEST}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if args.texts is None:
        loaded = prompts.load(list(prompts.PROMPTS), tokenizer)
        return [cut(name, ids, args.tokens) for name, ids in loaded.items()]
    texts, left_out = read(args.texts, lambda text: tokenizer.encode(text, add_special_tokens=False), args.tokens)
    if left_out:
        console.print(f"{len(left_out)} files left out, too short or no UTF-8 text: {', '.join(left_out[:5])} ...")
    return texts


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM's arguments."""
    from vericache.demo.run import ENGINE

    dtype = args.dtype or (ENGINE["dtype"] if args.model is None else "auto")
    return {"dtype": dtype, "kv_cache_memory_bytes": int(args.kv_gib * 2**30)}


def _longest(texts: Sequence[Text]) -> int:
    return max(len(piece) for text in texts for piece in text.pieces)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _finish(found: dict[str, Any], args: argparse.Namespace, beside: Path, console: Console) -> None:
    report.show(found, console)
    path = args.json or beside
    report.write(found, path)
    console.print(f"figures: {path}")
