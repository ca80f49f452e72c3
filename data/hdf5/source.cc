#include "lockstep/data/hdf5/source.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lockstep::data::hdf5 {

File::~File() {
  if (descriptor >= 0) close(descriptor);
}

const Segment& Column::SegmentOf(int64_t row) const {
  if (segments.size() == 1) return segments[0];
  return *(std::upper_bound(segments.begin(), segments.end(), row,
                            [](int64_t r, const Segment& s) { return r < s.first_row; }) -
           1);
}

const Segment& Column::SegmentOfBlock(int64_t block) const {
  return *(std::upper_bound(segments.begin(), segments.end(), block,
                            [](int64_t b, const Segment& s) { return b < s.first_block; }) -
           1);
}

int64_t Column::BlockOf(int64_t row) const {
  const Segment& segment = SegmentOf(row);
  return segment.first_block + (row - segment.first_row) / segment.block_rows;
}

RowRange Column::RowsOf(int64_t block) const {
  const Segment& segment = SegmentOfBlock(block);
  const int64_t begin = (block - segment.first_block) * segment.block_rows;
  return {segment.first_row + begin,
          segment.first_row + std::min(begin + segment.block_rows, segment.rows)};
}

int64_t Column::blocks() const {
  const Segment& last = segments.back();
  return last.first_block + (last.rows + last.block_rows - 1) / last.block_rows;
}

int64_t Source::PlainBytes(const Column& column, int64_t block) {
  const Segment& segment = column.SegmentOfBlock(block);
  return (segment.raw && !segment.offset ? segment.block_rows : column.RowsOf(block).size()) *
         column.row_bytes;
}

std::string Source::Where(const Column& column, int64_t block) {
  const Segment& segment = column.SegmentOfBlock(block);
  const RowRange rows = column.RowsOf(block);
  return absl::StrCat(segment.file->path, ": '", column.field.dataset, "', rows ",
                      rows.begin - segment.first_row, " to ", rows.end - 1 - segment.first_row);
}

absl::Status Source::ReadRows(const Column& column, const Segment& segment, RowRange rows,
                              uint8_t* plain) {
  std::vector<hsize_t> start(segment.sizes.size(), 0);
  std::vector<hsize_t> count = segment.sizes;
  start[0] = rows.begin - segment.first_row;
  count[0] = rows.size();
  const Handle file_space(H5Dget_space(segment.dataset.get()), H5Sclose);
  const Handle memory_space(H5Screate_simple(count.size(), count.data(), nullptr), H5Sclose);
  if (!file_space.ok() || !memory_space.ok() ||
      H5Sselect_hyperslab(file_space.get(), H5S_SELECT_SET, start.data(), nullptr, count.data(),
                          nullptr) < 0 ||
      H5Dread(segment.dataset.get(), segment.type.get(), memory_space.get(), file_space.get(),
              H5P_DEFAULT, plain) < 0) {
    return Hdf5Error(absl::StatusCode::kDataLoss,
                     absl::StrCat(Where(column, column.BlockOf(rows.begin)), ": cannot be read"));
  }
  return absl::OkStatus();
}

absl::Status Source::CheckLength(const Column& column, int64_t block, absl::Status status) {
  const File& file = *column.SegmentOfBlock(block).file;
  // Behind the end our own driver gives errors, HDF5's gives zeros.
  if (status.ok() && file.finds_chunks) return status;
  struct stat now;
  if (fstat(file.descriptor, &now) != 0 || now.st_size >= file.bytes) return status;
  return absl::DataLossError(absl::StrCat(
      Where(column, block), ": the file became shorter while it was read: it had ", file.bytes,
      " bytes, and now has ", now.st_size,
      "; do not write to files that are trained on, but rename new ones into their place"));
}

std::optional<ChunkPlace> Source::Find(const Column& column, int64_t block) {
  const Segment& segment = column.SegmentOfBlock(block);
  const RowRange rows = column.RowsOf(block);
  const int64_t begin = rows.begin - segment.first_row;
  if (segment.offset) {
    return ChunkPlace{*segment.offset + begin * column.row_bytes, rows.size() * column.row_bytes};
  }
  std::vector<hsize_t> start(segment.sizes.size(), 0);
  start[0] = begin;
  return FindChunk(segment.dataset.get(), start.data());
}

absl::Status Source::ReadAt(const Column& column, int64_t block, int64_t offset, int64_t bytes,
                            uint8_t* to) {
  const int descriptor = column.SegmentOfBlock(block).file->descriptor;
  while (bytes > 0) {
    const ssize_t count = pread(descriptor, to, bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      return absl::DataLossError(
          absl::StrCat(Where(column, block), ": cannot be read (",
                       count < 0 ? std::strerror(errno) : "the file ends before", ")"));
    }
    to += count;
    offset += count;
    bytes -= count;
  }
  return absl::OkStatus();
}

absl::Status Source::Read(const Column& column, int64_t block, StoredBlock& stored, uint8_t* plain,
                          int64_t* bytes_read) {
  return CheckLength(column, block, ReadBlock(column, block, stored, plain, bytes_read));
}

absl::Status Source::ReadBlock(const Column& column, int64_t block, StoredBlock& stored,
                               uint8_t* plain, int64_t* bytes_read) {
  const Segment& segment = column.SegmentOfBlock(block);
  const RowRange rows = column.RowsOf(block);
  stored.decoded = true;
  stored.bytes.clear();
  if (segment.offset || (segment.raw && segment.file->finds_chunks &&
                         (segment.raw_last || rows.size() == segment.block_rows))) {
    const std::optional<ChunkPlace> place = Find(column, block);
    if (place) return ReadStored(column, block, *place, stored, plain, bytes_read);
  } else if (segment.raw && (segment.raw_last || rows.size() == segment.block_rows)) {
    const Hdf5Lock lock;
    ChunkPlace place;
    std::vector<hsize_t> start(segment.sizes.size(), 0);
    start[0] = rows.begin - segment.first_row;
    hsize_t bytes = 0;
    if (H5Dget_chunk_storage_size(segment.dataset.get(), start.data(), &bytes) >= 0 && bytes > 0) {
      place.bytes = static_cast<int64_t>(bytes);
      place.offset = -1;
      return ReadStored(column, block, place, stored, plain, bytes_read);
    }
  }
  // HDF5 knows what a chunk stands for that was never written.
  *bytes_read += rows.size() * column.row_bytes;
  const Hdf5Lock lock;
  return ReadRows(column, segment, rows, plain);
}

// An offset of -1 stands for one that HDF5 keeps to itself.
absl::Status Source::ReadStored(const Column& column, int64_t block, const ChunkPlace& place,
                                StoredBlock& stored, uint8_t* plain, int64_t* bytes_read) {
  const Segment& segment = column.SegmentOfBlock(block);
  const int64_t plain_bytes = PlainBytes(column, block);
  if (place.bytes > 2 * plain_bytes + 1024) {
    return absl::DataLossError(absl::StrCat(Where(column, block), ": is damaged: the chunk has ",
                                            place.bytes, " bytes for ", plain_bytes,
                                            " of values; fetch the file again"));
  }
  uint8_t* to = plain;
  if (!segment.filters.empty() || place.bytes != plain_bytes) {
    stored.decoded = false;
    stored.skipped_filters = place.skipped_filters;
    stored.bytes.resize(place.bytes);
    to = stored.bytes.data();
  }
  *bytes_read += place.bytes;
  if (place.offset >= 0) return ReadAt(column, block, place.offset, place.bytes, to);
  std::vector<hsize_t> start(segment.sizes.size(), 0);
  start[0] = column.RowsOf(block).begin - segment.first_row;
  if (H5Dread_chunk(segment.dataset.get(), H5P_DEFAULT, start.data(), &stored.skipped_filters, to) <
      0) {
    return Hdf5Error(absl::StatusCode::kDataLoss,
                     absl::StrCat(Where(column, block), ": the chunk cannot be read"));
  }
  return absl::OkStatus();
}

absl::Status Source::ReadDirect(const Column& column, RowRange rows, const DirectPlace& place,
                                uint8_t* to) {
  const int64_t plain_bytes = PlainBytes(column, place.block);
  absl::Status status;
  if (!place.place) {
    const Hdf5Lock lock;
    status = ReadRows(column, column.SegmentOfBlock(place.block), rows, to);
  } else if (place.place->bytes != plain_bytes) {
    status = absl::DataLossError(
        absl::StrCat(Where(column, place.block), ": the chunk is damaged: it has ",
                     place.place->bytes, " bytes and not ", plain_bytes, "; fetch the file again"));
  } else {
    const int64_t before = rows.begin - column.RowsOf(place.block).begin;
    status = ReadAt(column, place.block, place.place->offset + before * column.row_bytes,
                    rows.size() * column.row_bytes, to);
  }
  return CheckLength(column, place.block, status);
}

absl::Status Source::Decode(const Column& column, int64_t block, const StoredBlock& stored,
                            Decoder& decoder, uint8_t* plain) const {
  const std::string wrong =
      decoder.Decode(column.SegmentOfBlock(block).filters, stored.skipped_filters, stored.bytes,
                     absl::MakeSpan(plain, static_cast<size_t>(PlainBytes(column, block))));
  if (wrong.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(Where(column, block), ": the chunk is damaged: ", wrong,
                                          "; fetch the file again"));
}

}  // namespace lockstep::data::hdf5
