#include "stream/wait_check.h"

#include <utility>

namespace shardcomm {
namespace {

thread_local std::function<void()> wait_check;

}  // namespace

WaitCheck::WaitCheck(std::function<void()> check) { wait_check = std::move(check); }
WaitCheck::~WaitCheck() { wait_check = nullptr; }

void check_wait() {
  if (wait_check) wait_check();
}

}  // namespace shardcomm
