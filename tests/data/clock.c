/* A wall clock that a test can set: preloaded into a server, it adds what the file RLOCK_TEST_CLOCK
 * says, in microseconds as a 64-bit integer, to the real time. The monotonic clock stays.
 *
 * libfaketime does more, but recurses without end in a server that is linked with jemalloc, whose
 * first allocation asks for the time. This allocates nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *ahead_us;

__attribute__((constructor)) static void map_the_file(void) {
    const char *path = getenv("RLOCK_TEST_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) ahead_us = mapped;
    close(fd);
}

static int is_wall(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = (int)syscall(SYS_clock_gettime, clock, at);
    if (result == 0 && ahead_us && is_wall(clock)) {
        int64_t us = (int64_t)at->tv_sec * 1000000 + at->tv_nsec / 1000 + *ahead_us;
        at->tv_sec = us / 1000000;
        at->tv_nsec = us % 1000000 * 1000;
    }
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

/* Valkey 8.1 and newer load modules so that they find the C library before us, and would have
 * another time than their server. */
void *dlopen(const char *file, int mode) {
    void *(*real)(const char *, int) = dlsym(RTLD_NEXT, "dlopen");
    return real(file, mode & ~RTLD_DEEPBIND);
}
