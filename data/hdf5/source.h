#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "lockstep/data/hdf5/driver.h"
#include "lockstep/data/hdf5/element.h"
#include "lockstep/data/hdf5/filters.h"
#include "lockstep/data/hdf5/handle.h"
#include "lockstep/data/hdf5/hdf5.h"
#include "lockstep/data/row_order.h"

namespace lockstep::data::hdf5 {

// A file, open twice: HDF5 reads zeros behind the end of a file that became shorter, so its size is
// looked at through a descriptor of our own.
struct File {
  File() = default;
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  std::string path;
  int descriptor = -1;
  int64_t bytes = 0;          // when it was opened
  bool finds_chunks = false;  // FindChunk works
  Handle handle;
};

// The part of a column that one file holds. Blocks are what is read at once: chunks, or where
// there are none that hold whole rows, as many rows as make a good read.
struct Segment {
  const File* file = nullptr;
  Handle dataset;
  Handle type;  // of its values in memory
  std::vector<hsize_t> sizes;
  int64_t first_row = 0;  // of the column
  int64_t rows = 0;
  int64_t first_block = 0;  // of the column
  int64_t block_rows = 1;
  // Values are stored as they are in memory, so that rows can be read from anywhere in a block.
  bool direct() const { return offset || (raw && filters.empty() && file->finds_chunks); }

  bool raw = false;             // Blocks are chunks that are read as stored and decoded by Decoder.
  bool raw_last = true;         // Also the last one, which may have fewer rows than block_rows.
  std::vector<Filter> filters;  // where raw
  std::optional<int64_t> offset;  // in the file, where rows lie one after the other in it
  std::vector<Handle> sources;    // files that it is put together from
};

// One field over all files.
struct Column {
  const Segment& SegmentOf(int64_t row) const;
  const Segment& SegmentOfBlock(int64_t block) const;
  int64_t BlockOf(int64_t row) const;
  RowRange RowsOf(int64_t block) const;
  int64_t blocks() const;

  Field field;  // with name and dtype
  Element element = Element::kUint8;
  Conversion conversion;
  std::vector<int64_t> shape;   // of a row in batches
  int64_t row_values = 1;       // values of a row
  int64_t row_bytes = 1;        // as decoded
  int64_t max_block_bytes = 0;  // of decoded blocks
  std::vector<Segment> segments;
};

// A block as it came from the file.
struct StoredBlock {
  bool decoded = false;  // It was written to its destination already.
  std::vector<uint8_t> bytes;
  uint32_t skipped_filters = 0;
};

// A block, and where it is.
struct DirectPlace {
  int64_t block = -1;
  std::optional<ChunkPlace> place;
};

// The open files. Thread-safe, but for Decoder.
class Source {
 public:
  static absl::StatusOr<std::unique_ptr<Source>> Open(const Options& options);

  int64_t rows() const { return rows_; }
  const std::vector<std::unique_ptr<Column>>& columns() const { return columns_; }
  const std::vector<std::string>& notes() const { return notes_; }
  std::string name() const { return name_; }  // of it all, for messages

  // Reads a block of a column: either into `stored`, or, where there is nothing to decode, into
  // `plain`, which has room for the decoded block. Adds to `bytes_read` what was read.
  absl::Status Read(const Column& column, int64_t block, StoredBlock& stored, uint8_t* plain,
                    int64_t* bytes_read);

  // Reads rows of one block of a direct() segment to where they belong.
  absl::Status ReadDirect(const Column& column, RowRange rows, const DirectPlace& place,
                          uint8_t* to);

  // Where a block is. Nothing where HDF5 does not say; ReadDirect reads it all the same.
  static std::optional<ChunkPlace> Find(const Column& column, int64_t block);

  // Decodes what Read stored.
  absl::Status Decode(const Column& column, int64_t block, const StoredBlock& stored,
                      Decoder& decoder, uint8_t* plain) const;

  // Room that a block takes when decoded: whole chunks, also where rows end before.
  static int64_t PlainBytes(const Column& column, int64_t block);

  // "a.h5: 'images', rows 0 to 255".
  static std::string Where(const Column& column, int64_t block);

 private:
  absl::Status ReadBlock(const Column& column, int64_t block, StoredBlock& stored, uint8_t* plain,
                         int64_t* bytes_read);
  absl::Status ReadStored(const Column& column, int64_t block, const ChunkPlace& place,
                          StoredBlock& stored, uint8_t* plain, int64_t* bytes_read);
  // Through HDF5, whatever the layout.
  absl::Status ReadRows(const Column& column, const Segment& segment, RowRange rows,
                        uint8_t* plain);
  static absl::Status ReadAt(const Column& column, int64_t block, int64_t offset, int64_t bytes,
                             uint8_t* to);
  // `status`, or that the file became shorter, which may be why.
  static absl::Status CheckLength(const Column& column, int64_t block, absl::Status status);

  std::vector<std::unique_ptr<File>> files_;
  std::vector<std::unique_ptr<Column>> columns_;
  std::vector<std::string> notes_;
  std::string name_;
  int64_t rows_ = 0;
};

}  // namespace lockstep::data::hdf5
