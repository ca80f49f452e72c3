#include "lockstep/tutorials/common/data_flag.h"

#include "absl/flags/flag.h"
#include "lockstep/data/mnist/mnist.h"

ABSL_FLAG(std::string, data, lockstep::data::mnist::kDefaultDirectory,
          "folder with the files of MNIST or Fashion-MNIST (IDX, plain or .gz)");
