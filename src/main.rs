//! The `eaglet` binary; `cli/` holds one file per command.
#![recursion_limit = "256"]

mod cli;

/// Every large tensor is allocated anew; mimalloc keeps the pages.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    cli::run()
}
