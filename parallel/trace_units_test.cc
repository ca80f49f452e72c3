#include "lockstep/parallel/trace_units.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/comm/testing/run_ranks.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/tools/trace/recorder.h"
#include "nlohmann/json.hpp"

namespace lockstep::parallel {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl() { linear = register_module("linear", torch::nn::Linear(8, 8)); }
  at::Tensor forward(at::Tensor x) { return at::tanh(linear(x)); }
  torch::nn::Linear linear = nullptr;
};
using Block = Unit<BlockImpl>;

// The second block's output is the model's.
class NetImpl : public torch::nn::Module {
 public:
  NetImpl() {
    a = register_module("a", Block());
    b = register_module("b", Block());
  }
  at::Tensor forward(at::Tensor x) { return b(a(x)); }
  Block a = nullptr;
  Block b = nullptr;
};
using Net = Unit<NetImpl>;

struct Event {
  std::string name;
  double begin;
  double end;
  int track;
};

// Complete events whose name begins with `prefix`, in order of time.
std::vector<Event> Recorded(const std::string& prefix) {
  const std::string path = ::testing::TempDir() + "/units.json";
  EXPECT_TRUE(trace::WriteChromeTrace(path, /*rank=*/0).ok());
  std::vector<Event> events;
  const nlohmann::json written = nlohmann::json::parse(std::ifstream(path));
  for (const nlohmann::json& event : written.at("traceEvents")) {
    const std::string name = event.at("name");
    if (event.at("ph") != "X" || !name.starts_with(prefix)) continue;
    const double begin = event.at("ts");
    events.push_back({name, begin, begin + event.at("dur").get<double>(), event.at("tid")});
  }
  std::ranges::stable_sort(events, {}, &Event::begin);
  return events;
}

std::vector<std::string> Names(const std::vector<Event>& events) {
  std::vector<std::string> names;
  for (const Event& event : events) names.push_back(event.name);
  return names;
}

bool Encloses(const Event& outer, const Event& inner) {
  constexpr double kRounding = 1e-3;  // of microseconds in double
  return outer.track == inner.track && outer.begin <= inner.begin + kRounding &&
         inner.end <= outer.end + kRounding;
}

TEST(TraceUnitsTest, UnitsLieInsideTheModelInTheirOrder) {
  Net net;
  const std::vector<HookHandle> tracing = TraceUnits(*net);
  trace::StartRecording();
  net(at::ones({4, 8})).sum().backward();
  trace::StopRecording();

  const std::vector<Event> forward = Recorded("FORWARD");
  EXPECT_THAT(Names(forward), UnorderedElementsAre("FORWARD", "FORWARD a", "FORWARD b"));
  for (const Event& event : forward) EXPECT_TRUE(Encloses(forward[0], event)) << event.name;

  std::vector<Event> backward = Recorded("BACKWARD");
  ASSERT_THAT(Names(backward), UnorderedElementsAre("BACKWARD", "BACKWARD a", "BACKWARD b"));
  std::ranges::sort(backward, {}, &Event::name);
  EXPECT_TRUE(Encloses(backward[0], backward[1]));
  EXPECT_TRUE(Encloses(backward[0], backward[2]));
  EXPECT_LE(backward[2].end, backward[1].begin + 1e-3);  // b's before a's
  EXPECT_GT(backward[1].end, backward[1].begin);
  EXPECT_GT(backward[2].end, backward[2].begin);
}

TEST(TraceUnitsTest, NothingIsRecordedWithoutAGradient) {
  Net net;
  const std::vector<HookHandle> tracing = TraceUnits(*net);
  trace::StartRecording();
  {
    const at::NoGradGuard no_grad;
    net(at::ones({4, 8}));
  }
  trace::StopRecording();
  EXPECT_THAT(Names(Recorded("BACKWARD")), IsEmpty());
  EXPECT_EQ(Recorded("FORWARD").size(), 3U);
}

TEST(TraceUnitsTest, ARecordingThatBeginsBetweenForwardAndBackwardHasBackward) {
  Net net;
  std::vector<HookHandle> tracing = TraceUnits(*net);
  trace::StopRecording();
  at::Tensor loss = net(at::ones({4, 8})).sum();
  trace::StartRecording();
  loss.backward();
  net(at::ones({4, 8}));
  tracing.clear();
  net(at::ones({4, 8}));  // no more
  trace::StopRecording();
  EXPECT_THAT(Names(Recorded("BACKWARD b")), ElementsAre("BACKWARD b"));
  EXPECT_EQ(Recorded("FORWARD").size(), 3U);
}

TEST(TraceUnitsTest, FsdpWaitsAndCommunicationAreBesideThem) {
  std::mutex one_by_one;  // ranks that are threads share the generator
  trace::StartRecording();
  comm::testing::RunRanks(2, [&](comm::Communicator& comm) {
    std::shared_ptr<Hooked<NetImpl>> net;
    {
      std::lock_guard lock(one_by_one);
      net = Net().ptr();
    }
    Fsdp fsdp(net, comm);
    const std::vector<HookHandle> hooks = TraceUnits(*net);
    net->forward(at::ones({4, 8})).sum().backward();
  });
  trace::StopRecording();

  EXPECT_EQ(Recorded("ALLGATHER Unit \"a\"").size(), 4U);  // forward and backward, two ranks
  EXPECT_EQ(Recorded("REDUCESCATTER Unit \"b\"").size(), 2U);
  EXPECT_EQ(Recorded("MEMCPY_IN_FUSION_BUFFER").size(), 8U);
  std::vector<Event> wholes;
  for (const Event& event : Recorded("BACKWARD")) {
    if (event.name == "BACKWARD") wholes.push_back(event);
  }
  ASSERT_EQ(wholes.size(), 2U);
  for (const Event& whole : wholes) {
    // Of each rank the last gradients, of which backward has to wait for the end.
    const std::vector<Event> waits = Recorded("WAIT_FOR_COMMUNICATION");
    EXPECT_TRUE(std::ranges::any_of(waits, [&](const Event& wait) {
      return Encloses(whole, wait) && wait.end > whole.end - 1e6;
    }));
  }
}

}  // namespace
}  // namespace lockstep::parallel
