"""Writes the .h5 files beside it, with h5py and h5repack: python3 generate.py [PATH OF h5repack]

Row r holds value(r, e) as element e, of any type, as test_files.h says; labels are value(r, 0) % 10.
"""
import os
import subprocess
import sys

import h5py
import numpy as np

ROWS, SHAPE = 50, (6, 5)


def values(rows=ROWS, shape=SHAPE):
    r = np.arange(rows)[:, None]
    e = np.arange(int(np.prod(shape)))[None, :]
    return ((31 * r + 7 * e + r // 10) % 100).reshape(rows, *shape)


def main():
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    x, y = values().astype("u1"), (values()[:, 0, 0] % 10).astype("i8")
    with h5py.File("h5py_gzip.h5", "w") as f:
        f.create_dataset("images", data=x, chunks=(8, *SHAPE), compression="gzip", shuffle=True, fletcher32=True)
        f.create_dataset("labels", data=y, chunks=(16,), compression="gzip")
    with h5py.File("h5py_v110.h5", "w", libver=("v110", "v110")) as f:
        f.create_dataset("images", data=x, chunks=(8, *SHAPE), maxshape=(None, *SHAPE), fletcher32=True)
        f.create_dataset("train/labels", data=y)
    with h5py.File("h5py_auto.h5", "w") as f:
        f.create_dataset("images", data=x, chunks=(20, 3, 2), compression="gzip")
        f.create_dataset("labels", data=y, compression="gzip")
    with h5py.File("h5py_lzf.h5", "w") as f:
        f.create_dataset("images", data=x, chunks=(8, *SHAPE), compression="lzf")
    with h5py.File("h5py_types.h5", "w") as f:
        for dtype in ["?", "<f2", ">f2", ">i4"]:
            kw = dict(chunks=(7, *SHAPE), compression="gzip", shuffle=True)
            data = values() % 2 if dtype == "?" else values()
            f.create_dataset({"?": "bool", "<f2": "f2", ">f2": "big_f2", ">i4": "big_i4"}[dtype], data=data.astype(dtype), **kw)
    with h5py.File("h5py_virtual.h5", "w") as f:
        layout = h5py.VirtualLayout(shape=(2 * ROWS, *SHAPE), dtype="u1")
        for i in range(2):
            layout[i * ROWS:(i + 1) * ROWS] = h5py.VirtualSource("h5py_gzip.h5", "images", shape=(ROWS, *SHAPE))
        f.create_virtual_dataset("images", layout)
    repack = sys.argv[1] if len(sys.argv) > 1 else "h5repack"
    subprocess.run([repack, "-l", "images:CHUNK=9x6x5", "-f", "images:SHUF", "-f", "images:GZIP=9",
                    "h5py_gzip.h5", "h5repack.h5"], check=True)


if __name__ == "__main__":
    main()
