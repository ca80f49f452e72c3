#pragma once

#include <hdf5.h>

#include <cstdint>
#include <optional>

namespace lockstep::data::hdf5 {

// Where a chunk is in its file, and how it was stored.
struct ChunkPlace {
  int64_t offset = 0;
  int64_t bytes = 0;
  uint32_t skipped_filters = 0;
};

// Lets files that are opened with `access` be read through a driver of our own. Like HDF5's, it
// reads with pread(2). Unlike that, it takes no locks, not of a virtual dataset's parts either;
// reading behind the end of a file is an error, where HDF5's gives zeros; and it can tell where a
// chunk is. False where HDF5 is too new: drivers have another interface from 1.13 on.
bool UseReadDriver(hid_t access);

// Where the chunk is that begins at `start`, in a file of that driver. Nothing where HDF5 does not
// say: of a chunk that was never written, and of one whose description is damaged. HDF5 1.10 itself
// goes through all chunks before it to answer that; the driver sees what HDF5 is about to read.
std::optional<ChunkPlace> FindChunk(hid_t dataset, const hsize_t* start);

}  // namespace lockstep::data::hdf5
