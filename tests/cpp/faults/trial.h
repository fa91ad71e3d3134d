// One run of an operation by forked ranks, one of which is the fault's victim.
#pragma once

#include <string>
#include <vector>

#include "faults/operations.h"
#include "faults/points.h"

namespace faults {

struct Trial {
  const Operation* operation;
  int size;
  int victim;
  Fault fault;
};

struct Result {
  bool reached = false;  // the victim came to the point
  bool fired = false;
  int errors = 0;      // that the point has
  int raised = 0;      // ranks that ended in an exception
  std::string point;   // its name
  std::string breach;  // which promise was broken; else ""
};

Result run(const Trial& trial);

}  // namespace faults
