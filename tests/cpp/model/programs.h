// What ranks are made to do, in every order.
#pragma once

#include <vector>

#include "ranks.h"

namespace model {

std::vector<Program> programs();

}  // namespace model
