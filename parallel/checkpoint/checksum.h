#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lockstep::parallel::checkpoint {

// CRC-32 as zlib's, Ethernet's and gzip's; of what comes after bytes whose checksum is `before`.
uint32_t Checksum(const void* data, size_t bytes, uint32_t before = 0);
uint32_t Checksum(const std::string& text);

}  // namespace lockstep::parallel::checkpoint
