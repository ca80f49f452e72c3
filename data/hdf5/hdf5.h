#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lockstep/data/dataset.h"

namespace lockstep::data::hdf5 {

// One HDF5 dataset (N, shape of a row...) that becomes one field of batches.
struct Field {
  std::string dataset;    // Path in the file: "images", "train/labels". Required.
  std::string name = "";  // In batches. Default: the last part of `dataset`.
  // Type in batches. Default: that of the file, or the next larger integer where LibTorch has no
  // arithmetic for that (uint16 to uint64); with `classes`, int64.
  std::optional<at::ScalarType> dtype = {};
  double divide_by = 1;  // What values are divided by, where dtype is a floating-point type: 255
                         // makes bytes brightness from 0 to 1. Default: 1.
  std::vector<int64_t> shape = {};      // Of a row. Default: that of the file. {1, 28, 28} gives
                                        // images of 28 x 28 a channel.
  std::optional<int64_t> classes = {};  // Values are class labels in [0, classes), and an error
                                        // names a row whose is not. Default: any value is good.
};

struct Options {
  std::vector<std::string> files;  // The rows of the first, of the second, ... Required.
  std::vector<Field> fields = {{.dataset = "images"}, {.dataset = "labels", .dtype = at::kLong}};
  int64_t memory_budget_bytes = 256 << 20;  // Of all chunks in memory. Default: 256 MiB.
  int decode_threads = 0;   // Threads that decompress; 0: one a core, at most 4. Default: 0.
  bool lock_files = false;  // Take HDF5's locks, which fail on Lustre and where a file system is
                            // mounted read-only. Default: false.
  // Read each file whole in a child process first. libhdf5 itself crashes on some damaged files:
  // with this, such a file is an error of Open and not the end of the program. For files of
  // unknown origin; costs one reading of them. Default: false.
  bool check_in_child = false;
};

// What happened since Open.
struct Stats {
  int64_t bytes_read = 0;                         // From the files, as stored.
  int64_t chunks_read = 0;                        // Also parts of what is stored in no chunks.
  int64_t peak_memory_bytes = 0;                  // The most that memory_budget_bytes had to cover.
  absl::Duration reading = absl::ZeroDuration();  // Of the reader thread, in HDF5.
  absl::Duration decoding = absl::ZeroDuration();           // Of the decoding threads, added up.
  absl::Duration waited_for_memory = absl::ZeroDuration();  // The reader, until rows were taken.
  absl::Duration waited_for_chunks = absl::ZeroDuration();  // Batches, until chunks were there.
};

class Hdf5Dataset : public Dataset {
 public:
  virtual Stats stats() const = 0;

  // What is unusual about the files, each a sentence: that a dataset is stored in no chunks, or
  // that HDF5 must decode it, in one thread.
  virtual const std::vector<std::string>& notes() const = 0;
};

// Chunked HDF5 files of any size as one dataset, streamed in bounded memory.
//
//   auto dataset = lockstep::ValueOrThrow(data::hdf5::Open({
//       .files = {"train.h5"},
//       .fields = {{.dataset = "images", .dtype = at::kFloat, .divide_by = 255,
//                   .shape = {1, 28, 28}},
//                  {.dataset = "labels", .classes = 10}}}));
//   data::ChunkShuffleSampler sampler(
//       {.chunks = dataset->chunks(), .window_chunks = dataset->window_chunks()});
//   data::Loader loader(std::move(dataset), sampler, {.batch_size = 64});
//   batch["images"];  // (64, 1, 28, 28) float32 in [0, 1]
//   batch["labels"];  // (64,) int64 in [0, 10)
//
// Reads what h5py, h5repack and others write: any integer, floating-point or boolean type in any
// byte order, any shape of a row, chunked or not, virtual datasets, and any filter that HDF5 has
// or finds as a plugin. HDF5 serves one thread at a time, so one thread reads along a Loader's
// order, as far ahead as the memory budget allows. Chunks of whole rows that are stored plain or
// with gzip, shuffle or fletcher32 are read as they are and decoded by other threads; HDF5 decodes
// the rest. Rows go from the chunk to the batch in one step, with their type and division; plain
// rows that are read in the order in which they are stored go there straight from the file.
//
// Memory: memory_budget_bytes covers all chunks, as stored and decoded, of one Loader (another one
// at the same time has as much again). The batches are the Loader's. A dataset that is small
// beside the budget stays in memory, so that labels in large chunks are read once only.
//
// chunks() are those of the largest dataset, or groups of them such that no chunk of another one
// lies across two groups. Files are opened read-only. Reads are thread-safe.
//
// Errors name file, dataset and rows. Open: NOT_FOUND for a missing file or dataset;
// INVALID_ARGUMENT for fields that do not fit the files (lengths or shapes that differ, types that
// cannot hold the values, no rows); FAILED_PRECONDITION for a filter that HDF5 does not have;
// DATA_LOSS for a file that is damaged, cut off or no HDF5 file; RESOURCE_EXHAUSTED where a chunk
// is too large for the memory budget. Reads: DATA_LOSS for a chunk that cannot be decoded, a wrong
// checksum, and a file that became shorter; OUT_OF_RANGE for a value that its type or `classes`
// does not allow. Where no checksum is stored, changed bytes may go unnoticed.
absl::StatusOr<std::unique_ptr<Hdf5Dataset>> Open(const Options& options);

}  // namespace lockstep::data::hdf5
