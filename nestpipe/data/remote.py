"""Files wherever they lie: on this machine, or at a URL that Arrow (s3, gs, hdfs, abfs) or fsspec (any other) opens.

Credentials come as these libraries take them: variables such as AWS_ACCESS_KEY_ID, AWS_REGION and, for a server of one's own,
AWS_ENDPOINT_URL; files such as ~/.aws; the machine's role. What Arrow takes in a URL may stand there too:
`s3://logs/day-*.parquet?region=eu-west-1`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import io
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote

import pyarrow as pa

_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]+)://(?P<host>[^/?]*)/?(?P<path>.*?)(?P<query>\?\w+=[^/*]*)?", re.I | re.S
)
_BY_ARROW = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")  # their bytes are read without the GIL
_ADVICE = {
    "s3": "credentials are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or the machine's role; AWS_REGION and "
    "AWS_ENDPOINT_URL say where",
    "gs": "credentials are what GOOGLE_APPLICATION_CREDENTIALS names, or the machine's account",
    "hdfs": "libhdfs is found by HADOOP_HOME, JAVA_HOME and CLASSPATH",
}
READ_BYTES = 8 << 20  # asked for at once where a file is read from front to back: each request costs a round trip


class Place(NamedTuple):
    """A file system, the path of a file or pattern in it, and what stands before and after a path there in a URL."""

    system: Any  # of pyarrow.fs, which is imported where it is used: it takes a while
    path: str
    before: str
    after: str


class Entry(NamedTuple):
    """kind: "file", "folder" or "missing"."""

    kind: str
    num_bytes: int


def is_url(path: str) -> bool:
    return _URL.fullmatch(path) is not None


def local_path(path: str) -> str:
    """`file:///data/day.csv` is the path /data/day.csv; everything else is as it was."""
    match = _URL.fullmatch(path)
    if match is None or match["scheme"].lower() != "file":
        return path
    if match["host"] not in ("", "localhost"):
        raise ValueError(f"{path}: a file on another machine; write file:///FOLDER/FILE for one on this machine")
    return "/" + unquote(match["path"])


def look(url: str) -> Entry:
    """What there is at a URL."""
    from pyarrow.fs import FileType

    with told(url):
        place = _place(url)
        info = place.system.get_file_info(place.path)
        kinds = {FileType.File: "file", FileType.Directory: "folder"}
        return Entry(kinds.get(info.type, "missing"), info.size or 0)


def matching(url: str) -> list[str]:
    """The files and folders that a URL with *, ? or [...] in it names, sorted; as with local paths, * does not match a slash, nor
    a dot at the beginning of a name."""
    from pyarrow.fs import FileSelector

    with told(url):
        place = _place(url)
        parts = place.path.split("/")
        literal = next((k for k, part in enumerate(parts) if _is_pattern(part)), len(parts))
        found = ["/".join(parts[:literal])]
        for part in parts[literal:]:
            if not _is_pattern(part):
                found = [f"{folder}/{part}" for folder in found]
                continue
            listed = (
                entry
                for folder in found
                for entry in place.system.get_file_info(FileSelector(folder, allow_not_found=folder != found[0]))
            )
            found = [
                entry.path
                for entry in listed
                if fnmatch.fnmatchcase(entry.base_name, part) and (part[0] == "." or entry.base_name[0] != ".")
            ]
        if literal < len(parts) and not _is_pattern(parts[-1]):
            infos = place.system.get_file_info(found) if found else []
            found = [info.path for info in infos if info.type.name != "NotFound"]
        return [f"{place.before}{path}{place.after}" for path in sorted(found)] if literal < len(parts) else []


def open_input(path: str, *, read_bytes: int = READ_BYTES) -> BinaryIO:
    """A local path or a URL, for reading bytes; it can seek. read_bytes: of a URL, asked for at once."""
    if not is_url(path):
        return open(path, "rb")
    return cast(BinaryIO, io.BufferedReader(cast(Any, _Raw(path)), read_bytes))


def arrow_input(path: str) -> Any:
    """What Arrow's readers take: a local path as it is, a file that is opened at a URL."""
    if not is_url(path):
        return path
    with told(path):
        place = _place(path)
        return place.system.open_input_file(place.path)


@contextlib.contextmanager
def told(url: str) -> Iterator[None]:
    """What goes wrong at a URL becomes a ValueError that names it, and says where credentials come from."""
    try:
        yield
    except (OSError, pa.ArrowException, ImportError) as error:
        scheme = url.partition(":")[0].lower()
        advice = _ADVICE.get(scheme, f"fsspec.open({url!r}) must work on this machine")
        raise ValueError(f"{url} cannot be read: {error}; {advice}") from error


class _Raw(io.RawIOBase):
    """A file at a URL as Python's own readers take it, with errors that name it."""

    def __init__(self, url: str) -> None:
        self._url, self._file = url, arrow_input(url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        with told(self._url):
            return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _is_pattern(part: str) -> bool:
    return any(letter in part for letter in "*?[")


def _place(url: str) -> Place:
    match = _URL.fullmatch(url)
    assert match is not None
    if match["scheme"].lower() in _BY_ARROW:
        base, query = f"{match['scheme']}://{match['host']}", match["query"] or ""
        system, root = _system(base, query)
        # The path is not given to Arrow as a part of the URL, where a space would be an error.
        return Place(system, f"{root}/{match['path']}", base[: len(base) - len(root)] if root else base, query)
    return _place_by_fsspec(url)


@functools.lru_cache(maxsize=64)
def _system(base: str, query: str) -> tuple[Any, str]:
    """A connection for all files of a bucket; root: what stands before all paths in it."""
    from pyarrow.fs import FileSystem

    system, root = FileSystem.from_uri(base + query)
    return system, root.rstrip("/")


def _place_by_fsspec(url: str) -> Place:
    import fsspec  # comes with torch
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    try:
        system, path = fsspec.core.url_to_fs(url)
    except ValueError as error:  # no such protocol
        raise ImportError(str(error)) from error
    whole = system.unstrip_protocol(path)
    return Place(PyFileSystem(FSSpecHandler(system)), path, whole[: len(whole) - len(path)], "")
