// Which kernels this machine can run.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace forerun {

// Names of the instruction sets this machine has, slowest first; `scalar` is always there.
std::vector<std::string> available_isas();
// The table of a name from available_isas(); throws std::invalid_argument for another.
const KernelTable& kernels_for(const std::string& isa);

}  // namespace forerun
