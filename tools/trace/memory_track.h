#pragma once

#include <vector>

#include "lockstep/tools/trace/memory.h"

namespace lockstep::trace {

// Puts a memory timeline beside the events that the recorder holds: a curve of bytes for each
// category that ever had some ("memory: activations") and one of their sum ("memory: all").
//
//   trace::StartRecording();
//   trace::StartMemoryTimeline();
//   ... a few steps ...
//   trace::StopRecording();
//   trace::RecordMemory(trace::StopMemoryTimeline());
//   absl::Status status = trace::WriteChromeTrace("/tmp/trace.0.json", comm.rank());
//
// A curve has a point where it changes.
void RecordMemory(const std::vector<MemorySample>& samples);

}  // namespace lockstep::trace
