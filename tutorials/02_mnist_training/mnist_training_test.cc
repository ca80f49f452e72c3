#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "lockstep/tutorials/common/subprocess.h"

namespace lockstep::tutorials {
namespace {

namespace fs = std::filesystem;

std::string BigEndian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

// Files as those of MNIST: an image of class k is noise with a bright bar in rows 2 k to 2 k + 4.
void WriteImages(const fs::path& folder, const std::string& name, uint32_t count) {
  std::string images = BigEndian(0x803) + BigEndian(count) + BigEndian(28) + BigEndian(28);
  std::string labels = BigEndian(0x801) + BigEndian(count);
  uint32_t noise = count;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t label = (7 * i + i / 10) % 10;
    labels += static_cast<char>(label);
    for (uint32_t row = 0; row < 28; ++row) {
      for (uint32_t column = 0; column < 28; ++column) {
        noise = noise * 1664525 + 1013904223;
        const bool bright = row >= 2 * label && row < 2 * label + 4;
        images += static_cast<char>((noise >> 25) + (bright ? 100 : 0));
      }
    }
  }
  std::ofstream(folder / (name + "-images-idx3-ubyte"), std::ios::binary) << images;
  std::ofstream(folder / (name + "-labels-idx1-ubyte"), std::ios::binary) << labels;
}

std::string DataFolder() {
  static const std::string* folder = [] {
    const fs::path path = fs::path(testing::TempDir()) / "bars";
    fs::create_directories(path);
    WriteImages(path, "train", 997);
    WriteImages(path, "t10k", 203);
    return new std::string(path.string());
  }();
  return *folder;
}

std::string TemporaryPath(const std::string& name) {
  return (fs::path(testing::TempDir()) / name).string();
}

Outcome Train(const std::vector<std::string>& flags, const RunOptions& options = {}) {
  std::vector<std::string> words = {"tutorials/02_mnist_training/mnist_training",
                                    absl::StrCat("--data=", DataFolder())};
  words.insert(words.end(), flags.begin(), flags.end());
  return RunProgram(words, options);
}

struct Line {
  double loss = -1;
  double test_loss = -1;
  double accuracy = -1;
  int steps = -1;
};

// The lines "before training: ..." and "epoch N: ...", checked to be these and no others.
std::vector<Line> Parse(const std::string& out) {
  const std::vector<std::string> texts = absl::StrSplit(out, '\n', absl::SkipEmpty());
  std::vector<Line> lines(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    Line& line = lines[i];
    if (i == 0) {
      EXPECT_EQ(
          std::sscanf(texts[i].c_str(), "before training: test loss %lf, test accuracy %lf %%",
                      &line.test_loss, &line.accuracy),
          2)
          << texts[i];
      continue;
    }
    size_t epoch = 0;
    double seconds = -1;
    EXPECT_EQ(
        std::sscanf(texts[i].c_str(),
                    "epoch %zu: loss %lf, test loss %lf, test accuracy %lf %%, %d steps in "
                    "%lf s",
                    &epoch, &line.loss, &line.test_loss, &line.accuracy, &line.steps, &seconds),
        6)
        << texts[i];
    EXPECT_EQ(epoch, i);
    EXPECT_GE(seconds, 0);
  }
  return lines;
}

TEST(MnistTrainingTest, EveryModelLearns) {
  const std::pair<std::string, std::string> cases[] = {
      {"mlp", "0.001"}, {"convnet", "0.001"}, {"vit", "0.0001"}};
  for (const auto& [model, lr] : cases) {
    const Outcome outcome =
        Train({"--model=" + model, "--lr=" + lr, "--epochs=2", "--steps=20", "--batch=32"});
    ASSERT_EQ(outcome.exit_status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "") << "a progress bar where there is no terminal";
    const std::vector<Line> lines = Parse(outcome.out);
    ASSERT_EQ(lines.size(), 3) << outcome.out;
    EXPECT_EQ(lines[2].steps, 20);
    EXPECT_LT(lines[0].accuracy, 40) << outcome.out;
    EXPECT_LT(lines[1].test_loss, lines[0].test_loss) << outcome.out;
    EXPECT_LT(lines[2].loss, 0.7 * lines[1].loss) << outcome.out;
    // To begin with, a vit cannot tell bars apart that lie at the same place of two patches.
    EXPECT_GT(lines[2].accuracy, 60) << outcome.out;
  }
}

TEST(MnistTrainingTest, AnEpochIsAllImages) {
  for (const std::string steps : {"--steps=0", "--steps=33"}) {
    const Outcome outcome = Train({"--model=mlp", "--epochs=1", "--batch=32", steps});
    const std::vector<Line> lines = Parse(outcome.out);
    ASSERT_EQ(lines.size(), 2) << outcome.out;
    EXPECT_EQ(lines[1].steps, 32);  // 997 images: 31 batches of 32, and one of 5
  }
}

TEST(MnistTrainingTest, SavedWeightsGoOnWhereTheyWere) {
  const std::string path = TemporaryPath("weights.safetensors");
  const Outcome first = Train({"--steps=9", "--epochs=1", "--save_weights=" + path});
  ASSERT_EQ(first.exit_status, 0) << first.err;
  const std::vector<Line> trained = Parse(first.out);
  ASSERT_EQ(trained.size(), 2);
  EXPECT_EQ(trained[1].steps, 9);

  const Outcome second = Train({"--epochs=0", "--seed=2", "--load_weights=" + path});
  ASSERT_EQ(second.exit_status, 0) << second.err;
  const std::vector<Line> loaded = Parse(second.out);
  ASSERT_EQ(loaded.size(), 1);
  EXPECT_EQ(loaded[0].test_loss, trained[1].test_loss);
  EXPECT_EQ(loaded[0].accuracy, trained[1].accuracy);
  EXPECT_NE(loaded[0].test_loss, trained[0].test_loss);
}

TEST(MnistTrainingTest, SeedDecidesAll) {
  const auto losses = [](const std::string& seed) {
    const Outcome outcome = Train({"--model=mlp", "--steps=3", "--epochs=2", "--seed=" + seed});
    std::string text;
    for (const Line& line : Parse(outcome.out)) {
      absl::StrAppend(&text, line.loss, " ", line.test_loss, "; ");
    }
    return text;
  };
  const std::string one = losses("1");
  EXPECT_EQ(losses("1"), one);
  EXPECT_NE(losses("2"), one);
}

TEST(MnistTrainingTest, RelativePathsStartWhereBazelRunWasTyped) {
  const Outcome outcome =
      Train({"--model=mlp", "--steps=1", "--epochs=1", "--save_weights=here.safetensors"},
            {.environment = {{"BUILD_WORKING_DIRECTORY", testing::TempDir()}}});
  EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
  EXPECT_TRUE(fs::exists(TemporaryPath("here.safetensors")));
}

TEST(MnistTrainingTest, ShowsABarOnATerminalAndTakesItAway) {
  const Outcome outcome = Train({"--model=mlp", "--steps=4", "--epochs=1"}, {.terminal = true});
  EXPECT_EQ(outcome.exit_status, 0);
  EXPECT_EQ(Parse(outcome.out).size(), 2);
  EXPECT_TRUE(absl::StartsWith(outcome.err, "\r\033[Kepoch 1 [")) << outcome.err;
  EXPECT_TRUE(absl::StrContains(outcome.err, "] 0/4")) << outcome.err;
  EXPECT_TRUE(absl::EndsWith(outcome.err, "\r\033[K")) << outcome.err;
}

// The lines "epoch N: ..." up to the time, which differs from run to run.
std::vector<std::string> Epochs(const std::string& out) {
  std::vector<std::string> epochs;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(out, '\n'))) {
    if (absl::StartsWith(line, "epoch ")) epochs.push_back(line.substr(0, line.rfind(" in ")));
  }
  return epochs;
}

const std::vector<std::string> kLongRun = {"--model=mlp", "--batch=8", "--epochs=3"};

std::vector<std::string> LongRun(const std::vector<std::string>& more) {
  std::vector<std::string> flags = kLongRun;
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

TEST(MnistTrainingTest, GoesOnAfterEachTimeLimitAsIfThereWereNone) {
  const Outcome whole = Train(kLongRun);
  ASSERT_EQ(whole.exit_status, 0) << whole.err;
  const std::string folder = TemporaryPath("limited");
  fs::remove_all(folder);
  std::vector<std::string> epochs;
  int runs = 0;
  Outcome part;
  do {
    part = Train(LongRun({"--checkpoint_dir=" + folder, "--time_limit=400ms"}));
    for (const std::string& epoch : Epochs(part.out)) epochs.push_back(epoch);
    if (part.exit_status != 0) {
      EXPECT_TRUE(absl::StrContains(part.err, "and ended, as told: run it again")) << part.err;
    }
  } while (part.exit_status == 75 && ++runs < 375);
  EXPECT_EQ(part.exit_status, 0) << part.err;
  EXPECT_GE(runs, 1) << "nothing was interrupted";
  EXPECT_EQ(epochs, Epochs(whole.out));

  // There is nothing left to do, until there is to be more.
  const Outcome again = Train(LongRun({"--checkpoint_dir=" + folder}));
  EXPECT_EQ(again.exit_status, 0) << again.err;
  EXPECT_EQ(again.out, "going on after step 375\n");
}

TEST(MnistTrainingTest, SavesOnSigterm) {
  const Outcome whole = Train(kLongRun);
  const std::string folder = TemporaryPath("terminated");
  fs::remove_all(folder);
  std::string command =
      absl::StrCat("tutorials/02_mnist_training/mnist_training --data=", DataFolder(),
                   " --checkpoint_dir=", folder);
  for (const std::string& flag : kLongRun) absl::StrAppend(&command, " ", flag);
  const Outcome first = RunProgram({"/bin/sh", "-c",
                                    command + "& until [ -e " + folder +
                                        "/lock ]; do sleep 0.01; done; kill -TERM $!; wait $!"});
  ASSERT_EQ(first.exit_status, 75) << first.err;
  const Outcome second = Train(LongRun({"--checkpoint_dir=" + folder}));
  ASSERT_EQ(second.exit_status, 0) << second.err;
  std::vector<std::string> epochs = Epochs(first.out);
  for (const std::string& epoch : Epochs(second.out)) epochs.push_back(epoch);
  EXPECT_EQ(epochs, Epochs(whole.out));
}

TEST(MnistTrainingTest, SavesEverySoManySteps) {
  const std::string folder = TemporaryPath("every");
  fs::remove_all(folder);
  const Outcome outcome = Train({"--model=mlp", "--epochs=1", "--steps=11", "--checkpoint_every=4",
                                 "--checkpoint_dir=" + folder});
  ASSERT_EQ(outcome.exit_status, 0) << outcome.err;
  for (const char* step : {"04", "08", "11"}) {
    EXPECT_TRUE(fs::exists(absl::StrCat(folder, "/step-0000000000", step, "/index.json"))) << step;
  }
}

// The rest of an epoch may take more steps than a whole one has at the new batch size.
TEST(MnistTrainingTest, SeesEveryImageOnceAtAnotherBatchSize) {
  const std::vector<std::string> flags = {"--model=mlp", "--epochs=1",
                                          "--checkpoint_dir=" + TemporaryPath("batches")};
  fs::remove_all(TemporaryPath("batches"));
  const auto train = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = flags;
    words.insert(words.end(), more.begin(), more.end());
    return Train(words);
  };
  ASSERT_EQ(train({"--batch=33", "--time_limit=1ms"}).exit_status, 75);
  const Outcome rest = train({"--batch=32"});
  ASSERT_EQ(rest.exit_status, 0) << rest.err;
  EXPECT_TRUE(absl::StartsWith(rest.out, "going on after step 1\n")) << rest.out;
  EXPECT_TRUE(absl::StrContains(rest.out, ", 32 steps in ")) << rest.out;  // 33 + 30 * 32 + 4 = 997
  EXPECT_TRUE(fs::exists(TemporaryPath("batches") + "/step-000000000032"));
}

TEST(MnistTrainingTest, EachMistakeGetsOneLine) {
  const std::string garbage = TemporaryPath("garbage.safetensors");
  std::ofstream(garbage) << "no weights";
  const std::string mlp = TemporaryPath("mlp.safetensors");
  ASSERT_EQ(Train({"--model=mlp", "--steps=1", "--epochs=1", "--save_weights=" + mlp}).exit_status,
            0);

  const std::string checkpoints = TemporaryPath("checkpoints");
  ASSERT_EQ(Train({"--model=mlp", "--steps=1", "--epochs=1", "--checkpoint_dir=" + checkpoints})
                .exit_status,
            0);

  struct Mistake {
    std::vector<std::string> flags;
    int exit_status;
    std::vector<std::string> told;
  };
  const Mistake mistakes[] = {
      {{"--data=/nowhere"}, 1, {"no train-images-idx3-ubyte", "'/nowhere'", "--data=DIR"}},
      {{"--model=resnet"}, 2, {"'resnet'", "choose one of mlp, convnet, vit, vit25m"}},
      {{"--device=cuda"}, 2, {"or use --device=cpu"}},
      {{"--batch=0"}, 2, {"'0'", "'batch'", "from 1 up"}},
      {{"--epochs=-1"}, 2, {"'-1'", "'epochs'"}},
      {{"--load_weights=/nowhere/x"}, 1, {"/nowhere/x"}},
      {{"--load_weights=" + garbage}, 1, {garbage}},
      {{"--load_weights=" + mlp}, 1, {mlp, "conv1.weight"}},
      {{"--model=mlp", "--steps=1", "--save_weights=/nowhere/x"}, 1, {"/nowhere/x"}},
      {{"--model=mlp", "--lr=1e30"}, 1, {"is no number any more", "--lr than 1e+30"}},
      {{"--model=convnet", "--checkpoint_dir=" + checkpoints},
       1,
       {checkpoints, "no tensor 'model/conv1.weight'"}},
      {{"--checkpoint_dir=/nowhere/x"}, 1, {"/nowhere/x: cannot make it"}},
      {{"--time_limit=5m"}, 1, {"--time_limit needs", "--checkpoint_dir=DIR"}},
      {{"--time_limit=5"}, 2, {"as in 90s, 55m"}},
      {{"--ranks=2"}, 2, {"there is no flag --ranks"}},
  };
  for (const Mistake& mistake : mistakes) {
    const Outcome outcome = Train(mistake.flags);
    EXPECT_EQ(outcome.exit_status, mistake.exit_status) << outcome.err;
    EXPECT_TRUE(absl::StartsWith(outcome.err, "mnist_training: ")) << outcome.err;
    EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << outcome.err;
    for (const std::string& text : mistake.told) {
      EXPECT_TRUE(absl::StrContains(outcome.err, text)) << text << " in " << outcome.err;
    }
  }
}

TEST(MnistTrainingTest, FashionMnistIsTheDefault) {
  const Outcome outcome = RunProgram(
      {"tutorials/02_mnist_training/mnist_training", "--model=mlp", "--steps=20", "--epochs=2"});
  ASSERT_EQ(outcome.exit_status, 0) << outcome.err;
  const std::vector<Line> lines = Parse(outcome.out);
  ASSERT_EQ(lines.size(), 3);
  EXPECT_LT(lines[2].loss, lines[1].loss);
  EXPECT_GT(lines[2].accuracy, 60) << outcome.out;
}

}  // namespace
}  // namespace lockstep::tutorials
