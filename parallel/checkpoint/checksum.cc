#include "lockstep/parallel/checkpoint/checksum.h"

#include <libdeflate.h>

namespace lockstep::parallel::checkpoint {

// Of the libraries that distributions have, the one that uses carry-less multiplication.
uint32_t Checksum(const void* data, size_t bytes, uint32_t before) {
  return libdeflate_crc32(before, data, bytes);
}

uint32_t Checksum(const std::string& text) { return Checksum(text.data(), text.size()); }

}  // namespace lockstep::parallel::checkpoint
