//! The `eaglet` binary; `cli/` holds one file per command.
#![recursion_limit = "256"]

mod cli;

/// Every large tensor is allocated anew, and mimalloc keeps the pages.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// mimalloc's number for `purge_delay`, which its binding does not name (`mi_option_t` in mimalloc.h).
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

fn main() -> std::process::ExitCode {
    // Freed pages are kept rather than given back: a training step frees and takes the same hundreds of megabytes
    // over and over, and having the kernel clear them each time costs a third of the speed.
    // SAFETY: sets a number in the allocator's table, before any other thread runs.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
    cli::run()
}
