"""The files of a model folder that a frontend needs: reading, digest, and sending them."""

import hashlib
import os
from pathlib import Path

from tandem.runtime.context import RequestContext
from tandem.runtime.errors import ModelError, NotFoundError
from tandem.runtime.membership.folder_files import is_there, open_file, read_file, weight_files
from tandem.runtime.plane.server import Responder
from tandem.runtime.printable import short
from tandem.runtime.wire.messages import ModelFiles, encode
from tandem.runtime.wire.sampling_defaults import sampling_defaults

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
    """Read the files. Raise ModelError naming one that is missing, or that cannot be read."""
    files = {}
    for name in (*REQUIRED, *OPTIONAL):
        path = folder / name
        if is_there(path):
            files[name] = read_file(path)
        elif name in REQUIRED:
            raise ModelError(f"model folder {folder} has no {name}")
    sampling_defaults(files)  # frontends will read them: a fault is found at the start
    return ModelFiles(files)


def weights_fingerprint(folder: Path, *, reads_weights: bool = True) -> str:
    """Return a digest that differs between fine-tunes of a model, from a part of the weights.

    BLAKE2b, hex, over config.json and, of each file of weights, its size and `NUM_SAMPLES` pieces
    spread evenly over it. Over config.json alone unless `reads_weights`. Raise ModelError.
    """
    digest = hashlib.blake2b(read_file(folder / "config.json"), digest_size=16)
    for name in weight_files(folder) if reads_weights else ():
        with open_file(folder / name) as weights:
            num_bytes = os.fstat(weights.fileno()).st_size
            digest.update(f"{name} {num_bytes} ".encode())
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
