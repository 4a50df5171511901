"""The files of a model folder that a frontend needs: reading, digest, and sending them."""

import hashlib
from pathlib import Path

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ModelError, NotFoundError
from tandem.runtime.messages import ModelFiles, encode
from tandem.runtime.plane.server import Responder
from tandem.runtime.printable import short

MODEL_FILES_ENDPOINT = "model_files"
REQUIRED = ("config.json", "tokenizer.json")
NUM_SAMPLES = 256
SAMPLE_BYTES = 4096
OPTIONAL = (
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
)


def read_model_files(folder: Path) -> ModelFiles:
    """Read the files. Raise ModelError naming a required file that is missing."""
    files = {}
    for name in (*REQUIRED, *OPTIONAL):
        path = folder / name
        if path.is_file():
            files[name] = path.read_bytes()
        elif name in REQUIRED:
            raise ModelError(f"model folder {folder} has no {name}")
    return ModelFiles(files)


def weights_fingerprint(folder: Path, *, reads_weights: bool = True) -> str:
    """Return a digest that differs between fine-tunes of a model, from a part of the weights.

    BLAKE2b, hex, over config.json and, of each *.safetensors file, its size and `NUM_SAMPLES`
    pieces spread evenly over it. Over config.json alone unless `reads_weights`.
    """
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted(folder.glob("*.safetensors")) if reads_weights else ():
        num_bytes = path.stat().st_size
        digest.update(f"{path.name} {num_bytes} ".encode())
        with path.open("rb") as weights:
            for i in range(NUM_SAMPLES):
                weights.seek(max(0, num_bytes - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                digest.update(weights.read(SAMPLE_BYTES))
    return digest.hexdigest()


def files_digest(model_files: ModelFiles) -> str:
    """Return BLAKE2b over names and contents, hex; equal folders have equal digests."""
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(model_files.files.items()):
        digest.update(len(name).to_bytes(4, "little") + name.encode())
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


class ModelFilesHolder:
    """Sends the files of every model that this process serves, by their digest."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}  # by digest, ready to send

    def add(self, model_files: ModelFiles) -> str:
        """Send these files from now on; return their digest."""
        digest = files_digest(model_files)
        self._files[digest] = encode(model_files)
        return digest

    async def send(self, payload: bytes, _context: RequestContext, responder: Responder) -> None:
        """Answer `model_files`; the payload is a digest. Raise NotFoundError for an unknown one."""
        digest = payload.decode("ascii", "replace")
        held = self._files.get(digest)
        if held is None:
            raise NotFoundError(f"no model files with digest {short(digest)!r} are held here")
        responder.send(held)
