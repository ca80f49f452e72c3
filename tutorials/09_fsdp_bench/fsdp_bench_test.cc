#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

constexpr char kAll[] = "--strategies=none,manual,ddp,zero1,zero2,fsdp";
constexpr char kProgram[] = "tutorials/09_fsdp_bench/fsdp_bench";

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// What a run wrote with --json.
nlohmann::json Bench(std::vector<std::string> flags) {
  const char* folder = std::getenv("TEST_TMPDIR");
  const std::string path = std::string(folder == nullptr ? "/tmp" : folder) + "/bench.json";
  std::vector<std::string> words = {kProgram, "--json=" + path};
  words.insert(words.end(), flags.begin(), flags.end());
  const Outcome outcome = RunProgram(words);
  EXPECT_EQ(outcome.exit_status, 0) << outcome.out << outcome.err;
  EXPECT_TRUE(Contains(outcome.out, "Losses: at every step within a relative")) << outcome.out;
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

const nlohmann::json& Find(const nlohmann::json& report, const char* strategy) {
  for (const nlohmann::json& each : report["strategies"]) {
    if (each["strategy"] == strategy) return each;
  }
  throw std::runtime_error(strategy);
}

void ExpectWithin(double share, double found, double expected, const std::string& what) {
  EXPECT_NEAR(found, expected, share * expected) << what;
}

// What was measured is what the formulas say.
void ExpectFormulas(const nlohmann::json& report) {
  for (const std::string name : {"none", "manual", "ddp", "zero1", "zero2", "fsdp"}) {
    const nlohmann::json& strategy = Find(report, name.c_str());
    const nlohmann::json& formula = strategy["formula_bytes"];
    const bool sharded = name == "zero1" || name == "zero2" || name == "fsdp";
    // Padding is a part of a per cent of these models; without shards there is none.
    const double padding = sharded ? 0.02 : 0;
    const double step_counts = 1e-4;  // of the optimizer, 4 bytes a parameter tensor
    ExpectWithin(padding + step_counts, strategy["kept_bytes"], formula["kept"], name);
    ExpectWithin(padding, strategy["peak_bytes"]["parameters"], formula["parameters"], name);
    ExpectWithin(padding + step_counts, strategy["peak_bytes"]["optimizer"], formula["optimizer"],
                 name);
    // Each operation's share of a ring is counted in whole bytes.
    ExpectWithin(padding + 1e-6, strategy["sent_bytes_per_step"], formula["sent_per_step"], name);
    if (name == "zero2" || name == "fsdp") {
      EXPECT_LE(strategy["peak_bytes"]["gradients"].get<double>(),
                1.02 * formula["gradients"].get<double>());
    } else {
      ExpectWithin(padding, strategy["peak_bytes"]["gradients"], formula["gradients"], name);
    }
    EXPECT_GT(strategy["peak_bytes"]["activations"], 0) << name;
  }
  const double bytes = report["parameters"].get<double>() * (report["dtype"] == "f64" ? 8 : 4);
  EXPECT_EQ(Find(report, "ddp")["payload_bytes_per_step"], bytes);
  EXPECT_EQ(Find(report, "manual")["payload_bytes_per_step"], bytes);
  EXPECT_EQ(Find(report, "none")["payload_bytes_per_step"], 0);
}

TEST(FsdpBenchTest, VitAgreesWithTheFormulas) {
  const nlohmann::json report = Bench({kAll, "--ranks=2", "--model=vit", "--steps=5", "--batch=8"});
  EXPECT_LE(report["loss_difference"], 1e-5);
  ExpectFormulas(report);
}

TEST(FsdpBenchTest, LossesAgreeTo1e9InF64OnThreeRanks) {
  const nlohmann::json report =
      Bench({kAll, "--ranks=3", "--model=mlp", "--steps=5", "--batch=5", "--dtype=f64"});
  EXPECT_LE(report["loss_difference"], 1e-9);
  ExpectFormulas(report);
}

TEST(FsdpBenchTest, AutocastChangesAllLossesAlike) {
  const std::vector<std::string> flags = {kAll, "--ranks=2", "--model=mlp", "--steps=3",
                                          "--batch=8"};
  std::vector<std::string> reduced = flags;
  reduced.emplace_back("--autocast=bf16");
  const nlohmann::json f32 = Bench(flags);
  const nlohmann::json bf16 = Bench(reduced);
  EXPECT_LE(bf16["loss_difference"], 1e-2);
  const double loss = f32["strategies"][0]["losses"][2];
  const double difference = std::abs(bf16["strategies"][0]["losses"][2].get<double>() - loss);
  EXPECT_GT(difference, 1e-6 * loss);
  EXPECT_LT(difference, 1e-1 * loss);
}

TEST(FsdpBenchTest, RunsWhatIsAskedFor) {
  const Outcome outcome = RunProgram({kProgram, "--ranks=1", "--model=convnet", "--steps=1",
                                      "--batch=2", "--strategies=fsdp,none"});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_TRUE(Contains(outcome.out, "convnet, 1 steps under each strategy; ranks: 1"))
      << outcome.out;
  EXPECT_TRUE(Contains(outcome.out, "\nfsdp "));
  EXPECT_TRUE(Contains(outcome.out, "\nnone "));
  EXPECT_FALSE(Contains(outcome.out, "\nddp "));
}

TEST(FsdpBenchTest, SaysThatTrainingDiverged) {
  const Outcome outcome = RunProgram({kProgram, "--ranks=2", "--model=mlp", "--steps=8",
                                      "--batch=4", "--strategies=none,ddp", "--lr=1e30"});
  EXPECT_EQ(outcome.exit_status, 1);
  EXPECT_TRUE(Contains(outcome.err, "a loss is no number any more")) << outcome.err;
}

TEST(FsdpBenchTest, EachMistakeGetsOneLine) {
  for (const auto& [flag, message] : std::vector<std::pair<std::string, std::string>>{
           {"--strategies=ddp,zero", "there is no strategy \"zero\""},
           {"--model=resnet", "resnet"},
           {"--dtype=f16", "f32 and f64 are possible"},
           {"--autocast=f16", "bf16 and none are possible"},
           {"--nvtx", "NVTX ranges need CUDA"},
           {"--ranks=0", "ranks"},
           {"--steps=0", "steps"},
           {"--colour=red", "colour"},
           {"--data=/nowhere", "/nowhere"},
           {"--json=/nowhere/bench.json", "/nowhere/bench.json"},
           {"--json=/dev/full", "what is there is no regular file"},
           {"--report=/dev/null/report", "cannot make the folder /dev/null/report"},
           {"--batch=40000", "--batch=40000"},
       }) {
    const Outcome outcome = RunProgram(
        {kProgram, "--ranks=2", "--steps=1", "--batch=1", "--model=mlp", "--strategies=ddp", flag});
    EXPECT_GT(outcome.exit_status, 0) << flag;
    EXPECT_TRUE(Contains(outcome.err, message)) << flag << ":\n" << outcome.err;
    EXPECT_LE(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 3) << outcome.err;
  }
}

}  // namespace
}  // namespace lockstep::tutorials
