# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The compiled twin of `_syncing_py.py`, where both classes are described."""

cimport cython
from libc.errno cimport EIO

import os

cdef extern from "sync_threads.h" nogil:
    int SYNC_THREADS_MAX

    struct synced_file:
        int failed

    struct sync_threads:
        int event
        int count
        synced_file **files

    void synced_file_init(synced_file *file, int fd, int names)
    void synced_file_close(synced_file *file)
    int synced_file_begin(synced_file *file)
    void synced_file_end(synced_file *file, int error)
    int sync_threads_init(sync_threads *all)
    int sync_threads_begin(sync_threads *all, int count)
    int sync_threads_room(sync_threads *all, int n)
    void sync_threads_start(sync_threads *all, int n)
    bint sync_threads_ended(sync_threads *all)
    void sync_threads_close(sync_threads *all)


@cython.final
cdef class SyncedFile:
    cdef synced_file _file

    def __cinit__(self, int fd, bint names=False):
        synced_file_init(&self._file, fd, names)

    def sync(self, fdatasync):
        cdef int fd, failed = EIO
        with nogil:
            fd = synced_file_begin(&self._file)
        if fd < 0:
            return self._file.failed
        try:
            fdatasync(fd)
            failed = 0
        except OSError as error:
            failed = error.errno or EIO
        finally:
            synced_file_end(&self._file, failed)
        return failed

    def close(self):
        synced_file_close(&self._file)

    def __dealloc__(self):
        synced_file_close(&self._file)


@cython.final
cdef class SyncThreads:
    cdef sync_threads _all
    cdef list _round
    cdef bint _closed

    def __cinit__(self, int count):
        cdef int error
        self._closed = True
        if not 0 < count <= SYNC_THREADS_MAX:
            raise ValueError(f"{count} threads")
        error = sync_threads_init(&self._all)
        if error:
            raise OSError(error, os.strerror(error))
        self._closed = False
        if sync_threads_begin(&self._all, count) == 0:
            self.close()
            raise OSError("no thread can be started")

    def fileno(self):
        return self._all.event

    def start(self, list files not None):
        cdef Py_ssize_t n = len(files), i
        if self._closed or self._round is not None or not n:
            raise ValueError("closed" if self._closed else "no files" if not n else "a round is under way")
        if sync_threads_room(&self._all, <int>n) != 0:
            raise MemoryError
        for i in range(n):
            self._all.files[i] = &(<SyncedFile?>files[i])._file
        self._round = list(files)
        sync_threads_start(&self._all, <int>n)

    def take(self):
        cdef list ended
        cdef Py_ssize_t i
        if self._round is None or not sync_threads_ended(&self._all):
            return None
        ended, self._round = self._round, None
        for i in range(len(ended)):
            ended[i] = (<SyncedFile>ended[i])._file.failed
        return ended

    def close(self):
        if not self._closed:
            self._closed = True
            with nogil:
                sync_threads_close(&self._all)
            self._round = None

    def __dealloc__(self):
        if not self._closed:
            sync_threads_close(&self._all)
