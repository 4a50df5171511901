"""The files of a model folder that a frontend needs, and their digest."""

import hashlib
from pathlib import Path

from tandem.runtime.errors import ModelError
from tandem.runtime.messages import ModelFiles

REQUIRED = ("config.json", "tokenizer.json")
NUM_SAMPLES = 256
SAMPLE_BYTES = 4096
OPTIONAL = (
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)


def read_model_files(folder: Path) -> ModelFiles:
    """Reads them all. Raises ModelError naming a required file that is missing."""
    files = {}
    for name in (*REQUIRED, *OPTIONAL):
        path = folder / name
        if path.is_file():
            files[name] = path.read_bytes()
        elif name in REQUIRED:
            raise ModelError(f"model folder {folder} has no {name}")
    return ModelFiles(files)


def weights_fingerprint(folder: Path) -> str:
    """Tells models of one architecture apart, fine-tunes of each other too, without reading all.

    BLAKE2b, hex, over config.json and, of each *.safetensors file, its size and `NUM_SAMPLES`
    pieces spread evenly over it.
    """
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes} ".encode())
        with path.open("rb") as weights:
            for i in range(NUM_SAMPLES):
                weights.seek(max(0, num_bytes - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                digest.update(weights.read(SAMPLE_BYTES))
    return digest.hexdigest()


def files_digest(model_files: ModelFiles) -> str:
    """BLAKE2b over names and contents, hex; equal folders have equal digests."""
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(model_files.files.items()):
        digest.update(len(name).to_bytes(4, "little") + name.encode())
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
