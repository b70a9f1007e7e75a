//! SIGINT and SIGTERM as a flag the loop reads between steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};

/// Set once a signal came; a second one ends the process at once.
#[derive(Debug, Clone, Default)]
pub struct Signals {
    received: Arc<AtomicUsize>,
}

impl Signals {
    /// Starts to listen.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn listen() -> std::io::Result<Self> {
        let received = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM] {
            // Registered first, so that it acts only on the second signal.
            let second = received.clone();
            let exit = move || {
                if second.load(Ordering::SeqCst) != 0 {
                    signal_hook::low_level::exit(128 + signal);
                }
            };
            // SAFETY: the handler only reads an atomic and calls `_exit`, both allowed in a signal handler.
            unsafe { signal_hook::low_level::register(signal, exit)? };
            signal_hook::flag::register_usize(signal, received.clone(), signal as usize)?;
        }
        Ok(Self { received })
    }

    /// The signal that came, if one did.
    pub fn received(&self) -> Option<i32> {
        match self.received.load(Ordering::SeqCst) {
            0 => None,
            signal => Some(signal as i32),
        }
    }
}
