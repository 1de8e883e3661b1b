/* Files that are synced, and threads that do nothing else: no Python, so none of them ever waits for the interpreter's
   lock. What is kept of a file is why its sync failed; what is kept of a round is how many files it has left. */

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

/* glibc 2.32 and 2.34 moved these into libc and gave them the version of that day, with the same code. Asked for by the
   oldest version, which every later library has too, a wheel runs where it says (manylinux_2_17). */
#if defined(__GLIBC__) && defined(__x86_64__)
#define OLDEST(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__GLIBC__) && defined(__aarch64__)
#define OLDEST(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#else
#define OLDEST(name) struct sync_threads
#endif
OLDEST(pthread_attr_setstacksize);
OLDEST(pthread_create);
OLDEST(pthread_join);
OLDEST(pthread_sigmask);
OLDEST(sem_init);
OLDEST(sem_post);
OLDEST(sem_wait);

#define SYNC_THREADS_MAX 16
#define SYNC_STACK_BYTES (256 << 10) /* the libraries keep their own per thread there too */
#define SYNC_SLICE_NS 100000 /* the least that the kernel takes */

struct synced_file {
    pthread_mutex_t syncing; /* one at a time: the kernel reports a failure to one caller, and success to another */
    pthread_mutex_t fields;  /* of those below; never held while the disk works */
    int fd;
    int names; /* a directory: fdatasync may leave its names to a later commit, fsync does not */
    int busy;
    int closed;
    int failed; /* the errno of the first sync that failed */
};

static void synced_file_init(struct synced_file *file, int fd, int names) {
    pthread_mutex_init(&file->syncing, NULL);
    pthread_mutex_init(&file->fields, NULL);
    file->fd = fd;
    file->names = names;
    file->busy = file->closed = file->failed = 0;
}

/* While a sync is under way the descriptor stays open until its end: its number may not become another file's. */
static void synced_file_close(struct synced_file *file) {
    pthread_mutex_lock(&file->fields);
    if (!file->closed) {
        file->closed = 1;
        if (!file->busy) close(file->fd);
    }
    pthread_mutex_unlock(&file->fields);
}

/* Whoever gets a descriptor syncs it and ends that; -1: the sync has failed, and is over. */
static int synced_file_begin(struct synced_file *file) {
    int fd = -1;
    pthread_mutex_lock(&file->syncing);
    pthread_mutex_lock(&file->fields);
    if (!file->failed && file->closed) file->failed = EBADF;
    if (!file->failed) {
        fd = file->fd;
        file->busy = 1;
    }
    pthread_mutex_unlock(&file->fields);
    if (fd < 0) pthread_mutex_unlock(&file->syncing);
    return fd;
}

static void synced_file_end(struct synced_file *file, int error) {
    pthread_mutex_lock(&file->fields);
    file->busy = 0;
    file->failed = error;
    if (file->closed) close(file->fd);
    pthread_mutex_unlock(&file->fields);
    pthread_mutex_unlock(&file->syncing);
}

static void synced_file_sync(struct synced_file *file) {
    int error = 0, fd = synced_file_begin(file);
    if (fd < 0) return;
    while ((file->names ? fsync(fd) : fdatasync(fd)) != 0 && (error = errno) == EINTR) error = 0;
    synced_file_end(file, error);
}

struct sync_threads {
    sem_t go; /* posts for threads that are to look for files, or to end; there may be more than files */
    int event;
    int count;
    pthread_mutex_t lock; /* of what follows, but for `files` and `n` while there is no round */
    int closing;
    int n;     /* files in the round */
    int taken; /* by threads */
    int synced;
    struct synced_file **files;
    int capacity;
    pthread_t threads[SYNC_THREADS_MAX];
};

struct schedule { /* sched_attr of sched(7), which C libraries came to name late */
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
};

/* A thread here runs for some microseconds and then waits for the disk, with others waiting for that. Asking for short
   slices, it does not wait until whoever has the core has used up a long one. Kernels before 6.12 do not heed it. */
static void sync_thread_asks_for_short_slices(void) {
    struct schedule mine;
    memset(&mine, 0, sizeof mine);
    if (syscall(SYS_sched_getattr, 0, &mine, sizeof mine, 0) != 0 || mine.policy != 0) return;
    mine.runtime = SYNC_SLICE_NS;
    syscall(SYS_sched_setattr, 0, &mine, 0);
}

static void *sync_thread(void *argument) {
    struct sync_threads *all = (struct sync_threads *)argument;
    uint64_t one = 1;
    sync_thread_asks_for_short_slices();
    for (;;) {
        while (sem_wait(&all->go) != 0) {
        }
        pthread_mutex_lock(&all->lock);
        while (all->taken < all->n) {
            struct synced_file *file = all->files[all->taken++];
            int more = all->taken < all->n;
            pthread_mutex_unlock(&all->lock);
            /* Right before it waits: the next one may take over this core. Woken by the loop, which goes on for a
               while, it would be sent behind whoever has another core. */
            if (more) sem_post(&all->go);
            synced_file_sync(file);
            pthread_mutex_lock(&all->lock);
            if (++all->synced == all->n) {
                ssize_t written = write(all->event, &one, sizeof one);
                (void)written; /* a counter of one cannot overflow */
            }
        }
        if (all->closing) {
            pthread_mutex_unlock(&all->lock);
            return NULL;
        }
        pthread_mutex_unlock(&all->lock);
    }
}

/* An errno, or 0. */
static int sync_threads_init(struct sync_threads *all) {
    if (sem_init(&all->go, 0, 0) != 0) return errno;
    pthread_mutex_init(&all->lock, NULL);
    all->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return all->event < 0 ? errno : 0;
}

/* Whether the round has ended; asked once after it has. */
static int sync_threads_ended(struct sync_threads *all) {
    uint64_t ended;
    return read(all->event, &ended, sizeof ended) == sizeof ended;
}

/* How many threads there are; signals are for the interpreter's own. */
static int sync_threads_begin(struct sync_threads *all, int count) {
    pthread_attr_t attributes;
    sigset_t every, before;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, SYNC_STACK_BYTES);
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    while (all->count < count && pthread_create(&all->threads[all->count], &attributes, sync_thread, all) == 0)
        all->count++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return all->count;
}

static int sync_threads_room(struct sync_threads *all, int n) {
    struct synced_file **files;
    if (n <= all->capacity) return 0;
    files = (struct synced_file **)realloc(all->files, n * sizeof *files);
    if (files == NULL) return -1;
    all->files = files;
    all->capacity = n;
    return 0;
}

static void sync_threads_start(struct sync_threads *all, int n) {
    pthread_mutex_lock(&all->lock);
    all->n = n;
    all->taken = all->synced = 0;
    pthread_mutex_unlock(&all->lock);
    sem_post(&all->go);
}

static void sync_threads_close(struct sync_threads *all) {
    int i;
    pthread_mutex_lock(&all->lock);
    all->closing = 1;
    pthread_mutex_unlock(&all->lock);
    for (i = 0; i < all->count; i++) sem_post(&all->go);
    for (i = 0; i < all->count; i++) pthread_join(all->threads[i], NULL);
    all->count = 0;
    if (all->event >= 0) close(all->event);
    all->event = -1;
    free(all->files);
    all->files = NULL;
    all->capacity = 0;
}
