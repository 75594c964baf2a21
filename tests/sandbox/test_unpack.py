"""Images as tar files: what is unpacked, and that nothing leads out of the target."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from legorl.errors import ImageError
from legorl.sandbox.local_image import LocalImage, local_image
from legorl.sandbox.unpack import UnpackError, unpack

Member = tuple[str, bytes | str, str]
"""Name, contents or target of a link, kind: file, program, dir, link, hard, fifo."""
_KINDS = {"dir": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE}


def tar_of(*members: Member) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, contents, kind in members:
            info = tarfile.TarInfo(name)
            info.type = _KINDS.get(kind, tarfile.REGTYPE)
            info.mode = 0o6755 if kind in ("program", "dir") else 0o644
            data = contents if isinstance(contents, bytes) else b""
            if kind in ("link", "hard"):
                assert isinstance(contents, str)
                info.linkname = contents
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def saved(*layers: bytes) -> bytes:
    config = json.dumps({"config": {"Env": ["PATH=/opt/bin", "A=b=c"]}}).encode()
    manifest = [{"Config": "config.json", "Layers": [f"{n}/layer.tar" for n in range(len(layers))]}]
    files = [(f"{n}/layer.tar", layer, "file") for n, layer in enumerate(layers)]
    return tar_of(
        *files, ("config.json", config, "file"), ("manifest.json", json.dumps(manifest).encode(), "file")
    )


def oci(*layers: bytes) -> bytes:
    def blob(data: bytes) -> tuple[dict[str, str], Member]:
        name = hashlib.sha256(data).hexdigest()
        return {"digest": f"sha256:{name}"}, (f"blobs/sha256/{name}", data, "file")

    config, config_file = blob(json.dumps({"config": {"Env": ["PATH=/opt/bin", "A=b=c"]}}).encode())
    blobs = [blob(layer) for layer in layers]
    manifest, manifest_file = blob(
        json.dumps({"config": config, "layers": [reference for reference, _ in blobs]}).encode()
    )
    index = json.dumps({"manifests": [manifest]}).encode()
    return tar_of(
        *(file for _, file in blobs),
        *(config_file, manifest_file, ("index.json", index, "file"), ("oci-layout", b"{}", "file")),
    )


@pytest.mark.parametrize("pack", [saved, oci])
def test_layers_lie_on_one_another(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    below = tar_of(
        ("bin", "usr/bin", "link"),
        ("usr/bin/tool", b"one", "program"),
        ("kept/a", b"a", "file"),
        ("gone/a", b"a", "file"),
        ("hidden/a", b"a", "file"),
        ("d", b"", "dir"),
    )
    above = tar_of(
        ("bin/tool", b"two", "file"),  # through the link of the layer below
        (".wh.gone", b"", "file"),
        ("hidden/b", b"b", "file"),
        ("hidden/.wh..wh..opq", b"", "file"),
        ("kept/hard", "kept/a", "hard"),
        ("d", b"now a file", "file"),
        ("pipe", b"", "fifo"),
    )
    image, root = tmp_path / "image.tar", tmp_path / "root"
    image.write_bytes(pack(below, above))
    root.mkdir()
    assert dict(unpack(image, root).env) == {"PATH": "/opt/bin", "A": "b=c"}
    names = ("bin/tool", "usr/bin/tool", "kept/a", "kept/hard", "hidden/b", "d")
    assert [(root / name).read_text() for name in names] == ["two", "two", "a", "a", "b", "now a file"]
    assert sorted(path.name for path in root.iterdir()) == ["bin", "d", "hidden", "kept", "usr"]
    assert not (root / "hidden" / "a").exists() and (root / "bin").is_symlink()


@pytest.mark.parametrize(
    "members",
    [
        [("../out", b"x", "file")],
        [("a/../../out", b"x", "file")],
        [("/out", b"x", "file")],
        [("link", "..", "link"), ("link/out", b"x", "file")],
        [("link", "OUTSIDE", "link"), ("link/out", b"x", "file")],
        [("link", "OUTSIDE/out", "link"), ("link", b"x", "file")],
        [("link", "OUTSIDE", "link"), (".wh.link", b"", "file"), ("link/.wh.secret", b"", "file")],
        [("copy", "../secret", "hard")],
        [("link", "OUTSIDE", "link"), ("copy", "link/secret", "hard")],
        [("a", "b", "link"), ("b", "a", "link"), ("a/out", b"x", "file")],
    ],
)
def test_nothing_leads_out(tmp_path: Path, members: list[Member]) -> None:
    outside, root, image = tmp_path / "outside", tmp_path / "outside" / "root", tmp_path / "image.tar"
    root.mkdir(parents=True)
    (outside / "secret").write_text("secret")
    image.write_bytes(
        tar_of(
            *((n, c.replace("OUTSIDE", str(outside)) if isinstance(c, str) else c, k) for n, c, k in members)
        )
    )
    try:
        unpack(image, root)
    except (UnpackError, OSError) as error:
        assert str(error)
    assert sorted(path.name for path in outside.iterdir()) == ["root", "secret"]
    assert (outside / "secret").stat().st_nlink == 1
    assert not any(path.is_file() and path.read_text() == "secret" for path in root.rglob("*"))


def image_at(reference: Path | str, cache: Path) -> LocalImage:
    return local_image(str(reference), cache)


def test_many_unpack_it_once(tmp_path: Path) -> None:
    tar, cache = tmp_path / "image.tar", tmp_path / "cache"
    tar.write_bytes(tar_of(("bin/sleep", b"#!", "program"), ("etc/passwd", b"root:x:0:0::/:/bin/sh", "file")))
    (cache / ".1-left.making").mkdir(parents=True)
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(lambda _: image_at(tar, cache), range(8)))
    assert len(set(map(repr, images))) == 1
    assert (Path(images[0].root) / "bin" / "sleep").read_bytes() == b"#!"
    assert len([path for path in cache.iterdir() if not path.name.startswith(".")]) == 1


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tar")
    (tmp_path / "broken.tar").write_bytes(
        tar_of(("manifest.json", b'[{"Config": "x", "Layers": []}]', "file"))
    )
    (tmp_path / "empty").mkdir()
    for reference, words in (
        (tmp_path / "absent.tar", "absent.tar.*No such file"),
        (tmp_path / "text", "text cannot be unpacked"),
        (tmp_path / "broken.tar", "broken.tar cannot be unpacked"),
        (tmp_path / "empty", "no bin/sleep.*is it a root file system"),
        ("python:3.12", "docker save python:3.12"),
    ):
        with pytest.raises(ImageError, match=words):
            image_at(reference, tmp_path / "cache")
