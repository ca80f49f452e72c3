#pragma once

namespace lockstep {

// Makes glibc's malloc keep what is freed, for programs that train on the CPU; call it first thing
// in main:
//
//   int main(int argc, char** argv) {
//     lockstep::KeepFreedMemory();
//     ...
//   }
//
// A training step allocates and frees the same large tensors over and over. By default malloc hands
// free memory at the end of its heap, and every block above 32 MiB, back to the system, which then
// has to zero and map it again page by page in the next step. How much this is depends on which
// small block happens to lie where: steps of a convolutional network took between 38 and 60 ms from
// run to run, and with this 38 ms in each. Nothing happens to a program that stays below the
// thresholds.
//
// It is for the whole process, whose memory afterwards stays at the most that it ever used; so it
// is for main to decide, and no library of ours calls it. It wins over the environment's
// MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_, which do the same for programs that cannot be
// changed (4294967296 and 1073741824).
//
// Returns whether malloc took it: false under another malloc, a sanitizer's too.
bool KeepFreedMemory();

}  // namespace lockstep
