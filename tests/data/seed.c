/* No randomness: preloaded into a server, it makes the seeds of its hash tables zeros, and those of
 * its modules. Then what a look-up costs is the same in every run. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

typedef FILE *(*opener)(const char *, const char *);

static FILE *open_other(const char *name, const char *path, const char *mode) {
    opener real = (opener)dlsym(RTLD_NEXT, name);
    return real(strcmp(path, "/dev/urandom") == 0 ? "/dev/zero" : path, mode);
}

FILE *fopen(const char *path, const char *mode) { return open_other("fopen", path, mode); }

FILE *fopen64(const char *path, const char *mode) { return open_other("fopen64", path, mode); }

ssize_t getrandom(void *buffer, size_t len, unsigned flags) {
    (void)flags;
    memset(buffer, 0, len);
    return (ssize_t)len;
}
