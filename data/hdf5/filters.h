#pragma once

#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace lockstep::data::hdf5 {

// A step of what was done to the bytes of a chunk before they were stored.
struct Filter {
  enum Kind { kDeflate, kShuffle, kFletcher32 };
  Kind kind;
  size_t element_bytes = 1;  // kShuffle: what it takes apart. 0 and 1: nothing.
};

// Undoes filters without HDF5, so in any number of threads: one decoder for each.
class Decoder {
 public:
  Decoder() = default;
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // Undoes `filters`, last to first, without those whose bit (1 << index) is in `skipped`, and
  // writes what was there before them to `plain`. Returns what is wrong, as a sentence about the
  // chunk ("its checksum is wrong"); nothing where all is well.
  std::string Decode(const std::vector<Filter>& filters, uint32_t skipped,
                     absl::Span<const uint8_t> stored, absl::Span<uint8_t> plain);

  // Bytes of memory that it keeps.
  size_t memory_bytes() const { return scratch_[0].capacity() + scratch_[1].capacity(); }

 private:
  std::string Inflate(absl::Span<const uint8_t> from, absl::Span<uint8_t> to, size_t* bytes);

  std::vector<uint8_t> scratch_[2];
  z_stream stream_ = {};
  bool stream_ready_ = false;
};

// HDF5's checksum: that of J. Fletcher (1982) over 16-bit big-endian words.
uint32_t Fletcher32(absl::Span<const uint8_t> bytes);

// What shuffle did: byte b of all elements lay together. A rest that is no whole element stays.
void Unshuffle(absl::Span<const uint8_t> from, size_t element_bytes, uint8_t* to);

}  // namespace lockstep::data::hdf5
