// The ranks are processes that this one forks: train_fork [how many]
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "train.h"

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  try {
    const shc::UniqueId id = shc::unique_id(SHC_SHM, size);
    for (int rank = 0; rank < size; ++rank) {
      if (fork() != 0) continue;
      train(shc::Comm(size, id, rank));
      return 0;
    }
  } catch (const shc::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  int status = 0, failed = 0;
  while (wait(&status) > 0) failed |= status != 0;
  return failed;
}
