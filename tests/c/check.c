#define _POSIX_C_SOURCE 200809L

#include "check.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const double kDeadlineS = 60;

void require(int holds, const char* claim) {
  if (holds) return;
  fprintf(stderr, "not so: %s\n", claim);
  exit(1);
}

void ok(shc_status status) {
  if (status == SHC_OK) return;
  fprintf(stderr, "%s: %s\n", shc_status_name(status), shc_last_error_text());
  exit(1);
}

void refused(shc_status status, shc_status wanted, const char* part) {
  if (status == wanted && strstr(shc_last_error_text(), part) != NULL) return;
  fprintf(stderr, "wanted %s with \"%s\", got %s: %s\n", shc_status_name(wanted), part,
          shc_status_name(status), shc_last_error_text());
  exit(1);
}

static shc_comm* connect_rank(const shc_unique_id* id, int rank, int size) {
  shc_comm_options options = SHC_COMM_OPTIONS_INIT;
  options.deadline_s = kDeadlineS;
  shc_comm* comm = NULL;
  ok(shc_comm_init_rank(&comm, size, id, rank, &options));
  // Where it ends well, all ranks have left their set-up, which a rank that gives up would make
  // fail. So it may fail here, and the body then sees the same.
  shc_barrier(comm, 0, NULL);
  return comm;
}

void processes_end(int size, rank_main body, int* ends) {
  shc_unique_id id;
  ok(shc_get_unique_id(SHC_SHM, size, &id));
  pid_t pids[16];
  for (int rank = 0; rank < size; ++rank) {
    pids[rank] = fork();
    require(pids[rank] >= 0, "a process can be made");
    if (pids[rank] != 0) continue;
    alarm(2 * (unsigned)kDeadlineS);
    shc_comm* comm = connect_rank(&id, rank, size);
    body(comm);
    shc_comm_destroy(comm);
    fflush(NULL);
    _exit(0);
  }
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    require(waitpid(pids[rank], &status, 0) == pids[rank], "a rank can be waited for");
    ends[rank] = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
}

void on_processes(int size, rank_main body) {
  int ends[16];
  processes_end(size, body, ends);
  for (int rank = 0; rank < size; ++rank) require(ends[rank] == 0, "every rank ends well");
}

struct thread_rank {
  const shc_unique_id* id;
  int rank;
  int size;
  rank_main body;
};

static void* run_thread(void* given) {
  const struct thread_rank* own = given;
  shc_comm* comm = connect_rank(own->id, own->rank, own->size);
  own->body(comm);
  shc_comm_destroy(comm);
  return NULL;
}

void on_threads(int size, rank_main body) {
  shc_unique_id id;
  ok(shc_get_unique_id(SHC_LOCAL, size, &id));
  pthread_t threads[16];
  struct thread_rank ranks[16];
  for (int rank = 0; rank < size; ++rank) {
    ranks[rank] = (struct thread_rank){&id, rank, size, body};
    require(pthread_create(&threads[rank], NULL, run_thread, &ranks[rank]) == 0,
            "a thread can be made");
  }
  for (int rank = 0; rank < size; ++rank) pthread_join(threads[rank], NULL);
}

int rank_of(const shc_comm* comm) {
  int rank = -1;
  ok(shc_comm_rank(comm, &rank));
  return rank;
}

int size_of(const shc_comm* comm) {
  int size = -1;
  ok(shc_comm_size(comm, &size));
  return size;
}

float value_of(int rank, int64_t i) { return (float)((rank * 37 + i * 11) % 17 - 8); }
