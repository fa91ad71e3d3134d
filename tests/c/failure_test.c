// What goes wrong between ranks: a status, a sentence and its fields, on every rank, before the
// deadline; and afterwards the communicator only fails.
#define _POSIX_C_SOURCE 200809L

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static shc_error last_error(void) {
  shc_error error = SHC_ERROR_INIT;
  ok(shc_last_error(&error));
  return error;
}

static void one_dies(shc_comm* comm) {
  if (rank_of(comm) == 1) raise(SIGKILL);
  refused(shc_barrier(comm, 0, NULL), SHC_COMM_ERROR, "rank 1");
  const shc_error error = last_error();
  require(strcmp(error.kind, "died") == 0 && error.rank == 1, "who died");
  require(strcmp(error.operation, "barrier") == 0 && error.sequence > 0, "in which call");
  refused(shc_comm_check(comm), SHC_COMM_ERROR, "rank 1");
  float number = 0;
  refused(shc_all_reduce(comm, &number, SHC_F32, 1, SHC_SUM, 0, NULL), SHC_COMM_ERROR, "rank 1");
}

static void they_call_different_things(shc_comm* comm) {
  float numbers[2] = {0, 0};
  const int64_t count = rank_of(comm) == 0 ? 1 : 2;
  refused(shc_all_reduce(comm, numbers, SHC_F32, count, SHC_SUM, 0, NULL), SHC_COMM_ERROR,
          "all_reduce(f32");
  require(strcmp(last_error().kind, "mismatch") == 0, "a mismatch");
}

static void one_leaves(shc_comm* comm) {
  if (rank_of(comm) == 0) {
    ok(shc_comm_close(comm));
    refused(shc_barrier(comm, 0, NULL), SHC_COMM_ERROR, "closed");
    return;
  }
  refused(shc_barrier(comm, 0, NULL), SHC_COMM_ERROR, "rank 0");
  require(strcmp(last_error().kind, "closed") == 0, "it was closed");
}

static void one_gives_up(shc_comm* comm) {
  if (rank_of(comm) == 0) ok(shc_comm_abort(comm, "the loss is NaN"));
  refused(shc_barrier(comm, 0, NULL), SHC_COMM_ERROR, "the loss is NaN");
  require(strcmp(last_error().kind, "aborted") == 0, "it was aborted");
}

static void a_forked_child_is_not_the_rank(shc_comm* comm) {
  const pid_t child = fork();
  if (child == 0) {
    refused(shc_comm_abort(comm, "the child gives up"), SHC_COMM_ERROR,
            "this process was forked from rank");
    refused(shc_comm_name_tag(comm, INT64_C(1) << 32, "mine"), SHC_COMM_ERROR,
            "this process was forked from rank");
    ok(shc_comm_close(comm));  // it lets go of what it has
    shc_comm_destroy(comm);
    _exit(0);
  }
  int status = 0;
  require(waitpid(child, &status, 0) == child && status == 0, "the child ends well");
  ok(shc_barrier(comm, 0, NULL));
}

static int at_the_third_look(void* looks) {
  *(int*)looks += 1;
  return *(int*)looks == 3;
}

static void a_wait_check_ends_a_wait(shc_comm* comm) {
  int looks = 0;
  if (rank_of(comm) == 0) {
    ok(shc_set_wait_check(at_the_third_look, &looks));
    // The other comes when this rank has given up, and hears that.
    refused(shc_barrier(comm, 0, NULL), SHC_INTERRUPTED, "wait check");
    require(looks == 3, "it was asked until it ended the wait");
    ok(shc_set_wait_check(NULL, NULL));
    refused(shc_barrier(comm, 0, NULL), SHC_COMM_ERROR, "interrupted");
    require(looks == 3, "a check that was taken away is not asked");
    return;
  }
  const struct timespec pause = {0, 1000000};
  while (shc_comm_check(comm) == SHC_OK) nanosleep(&pause, NULL);
  refused(shc_barrier(comm, 0, NULL), SHC_COMM_ERROR, "interrupted");
  require(strcmp(last_error().kind, "aborted") == 0, "it was aborted");
}

static void a_wait_check_ends_a_wait_for_an_event(shc_comm* comm) {
  char token = 0;
  if (rank_of(comm) == 1) {
    ok(shc_recv(comm, &token, 1, 0, 0, NULL));
    ok(shc_barrier(comm, 0, NULL));
    return;
  }
  int looks = 0;
  shc_stream* stream = NULL;
  shc_event* end = NULL;
  ok(shc_stream_create_thread(&stream));
  ok(shc_barrier(comm, 0, stream));
  ok(shc_stream_record(stream, &end));
  ok(shc_set_wait_check(at_the_third_look, &looks));
  refused(shc_event_wait(end, 20), SHC_INTERRUPTED, "shc_event_wait: the thread's wait check");
  require(looks == 3, "it was asked until it ended the wait");
  ok(shc_set_wait_check(NULL, NULL));
  require(shc_event_wait(end, 0.12) == SHC_NOT_READY, "it has not fired");
  ok(shc_send(comm, &token, 1, 1, 0));
  ok(shc_event_wait(end, 60));
  shc_event_destroy(end);
  shc_stream_destroy(stream);
}

static void a_thread_has_a_deadline_of_its_own(shc_comm* comm) {
  double deadline_s = -1;
  refused(shc_set_deadline(-1), SHC_INVALID_ARGUMENT, "deadline_s is -1");
  if (rank_of(comm) == 0) {
    ok(shc_set_deadline(0.2));
    refused(shc_barrier(comm, 0, NULL), SHC_COMM_ERROR, "rank 1 (pid");
    require(strstr(last_error().text, "did not come within 0.2 s") != NULL, "it was the thread's");
    ok(shc_set_deadline(0));
  } else {
    const struct timespec pause = {0, 1000000};
    while (shc_comm_check(comm) == SHC_OK) nanosleep(&pause, NULL);
    refused(shc_barrier(comm, 0, NULL), SHC_COMM_ERROR, "0.2 s");
  }
  ok(shc_get_deadline(&deadline_s));
  require(deadline_s == 0, "the group's holds again");
}

static void a_message_keeps_to_the_threads_deadline(shc_comm* comm) {
  if (rank_of(comm) == 0) {
    char byte = 0;
    ok(shc_set_deadline(0.2));
    refused(shc_recv(comm, &byte, 1, 1, 0, NULL), SHC_COMM_ERROR, "within 0.2 s");
    ok(shc_set_deadline(0));
  } else {
    const struct timespec pause = {0, 1000000};
    while (shc_comm_check(comm) == SHC_OK) nanosleep(&pause, NULL);
  }
}

static void a_stream_carries_the_failure(shc_comm* comm) {
  shc_stream* stream = NULL;
  ok(shc_stream_create_thread(&stream));
  if (rank_of(comm) == 1) raise(SIGKILL);
  ok(shc_barrier(comm, 0, stream));  // it is queued
  ok(shc_barrier(comm, 0, stream));
  shc_event* end = NULL;
  ok(shc_stream_record(stream, &end));
  refused(shc_event_wait(end, -1), SHC_COMM_ERROR, "rank 1");
  require(last_error().rank == 1, "also on the thread that waits");
  shc_event_destroy(end);
  shc_stream_destroy(stream);
}

static void nobody_comes(void) {
  shc_unique_id id;
  ok(shc_get_unique_id(SHC_SHM, 2, &id));
  shc_comm_options options = SHC_COMM_OPTIONS_INIT;
  options.deadline_s = 0.2;
  shc_comm* comm = NULL;
  refused(shc_comm_init_rank(&comm, 2, &id, 0, &options), SHC_COMM_ERROR,
          "rank 1 did not come within 0.2 s; it has not connected");
  require(comm == NULL, "no handle where there is an error");
  ok(shc_get_unique_id(SHC_LOCAL, 2, &id));
  refused(shc_comm_init_rank(&comm, 2, &id, 1, &options), SHC_COMM_ERROR, "rank 0");
  refused(shc_comm_init_rank(&comm, 2, &id, 1, &options), SHC_INVALID_ARGUMENT,
          "rank 1 has come already");
}

// The new group's memory may have the descriptor that the first one's had.
static void an_old_id_is_not_that_of_a_later_group(void) {
  shc_unique_id ids[2];
  shc_comm* comm = NULL;
  ok(shc_get_unique_id(SHC_SHM, 1, &ids[0]));
  ok(shc_comm_init_rank(&comm, 1, &ids[0], 0, NULL));
  shc_comm_destroy(comm);
  comm = NULL;
  ok(shc_get_unique_id(SHC_SHM, 1, &ids[1]));
  refused(shc_comm_init_rank(&comm, 1, &ids[0], 0, NULL), SHC_COMM_ERROR,
          "the group has connected already, or has ended");
  ok(shc_comm_init_rank(&comm, 1, &ids[1], 0, NULL));
  shc_comm_destroy(comm);
}

static void threads_of_another_process_are_refused(void) {
  shc_unique_id id;
  ok(shc_get_unique_id(SHC_LOCAL, 2, &id));
  const pid_t child = fork();
  if (child == 0) {
    shc_comm_options options = SHC_COMM_OPTIONS_INIT;
    options.deadline_s = 0.2;
    shc_comm* comm = NULL;
    refused(shc_comm_init_rank(&comm, 2, &id, 1, &options), SHC_INVALID_ARGUMENT,
            "they must be of the process that made it");
    _exit(0);
  }
  int status = 0;
  require(waitpid(child, &status, 0) == child && status == 0, "at once");
}

static void memory_outlives_its_group(shc_comm* comm) {
  shc_memory* memory = NULL;
  void* data = NULL;
  ok(shc_allocate(comm, 4096, SHC_GATHER, &memory, &data));
  ok(shc_comm_close(comm));
  memset(data, 1, 4096);
  shc_memory_destroy(memory);
}

static void with_the_end_of_rank_1(rank_main body) {
  int ends[3];
  processes_end(3, body, ends);
  require(ends[0] == 0 && ends[1] == -SIGKILL && ends[2] == 0, "the others end well");
}

int main(void) {
  with_the_end_of_rank_1(one_dies);
  with_the_end_of_rank_1(a_stream_carries_the_failure);
  on_processes(2, they_call_different_things);
  on_processes(3, one_leaves);
  on_processes(3, one_gives_up);
  on_threads(3, one_gives_up);
  on_processes(2, a_forked_child_is_not_the_rank);
  on_processes(2, a_wait_check_ends_a_wait);
  on_threads(2, a_wait_check_ends_a_wait);
  on_processes(2, a_wait_check_ends_a_wait_for_an_event);
  on_threads(2, a_wait_check_ends_a_wait_for_an_event);
  on_processes(2, a_thread_has_a_deadline_of_its_own);
  on_processes(2, a_message_keeps_to_the_threads_deadline);
  on_threads(2, they_call_different_things);
  on_processes(2, memory_outlives_its_group);
  nobody_comes();
  an_old_id_is_not_that_of_a_later_group();
  threads_of_another_process_are_refused();
  return 0;
}
