#include "stream/wait_check.h"

#include <utility>

namespace shardcomm {
namespace {

thread_local std::function<void()> wait_check;

}  // namespace

WaitCheck::WaitCheck(std::function<void()> check)
    : before_(std::exchange(wait_check, std::move(check))) {}
WaitCheck::~WaitCheck() { wait_check = std::move(before_); }

void set_wait_check(std::function<void()> check) { wait_check = std::move(check); }

void check_wait() {
  const std::function<void()> check = wait_check;  // which may wait itself, with one of its own
  if (check) check();
}

}  // namespace shardcomm
