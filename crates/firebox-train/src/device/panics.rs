//! Listens for panics of a device's service threads. Nothing else reports these: CubeCL catches
//! them and continues.
//!
//! A panic hook is the only place where they show. A hook belongs to the process, so there is one
//! for all Learners. It calls the hook that was installed earlier for every panic, except for
//! panics of steps that continue with zeros. It records panics only while a [`Listener`] exists.

use std::panic::{PanicHookInfo, set_hook, take_hook};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::ThreadId;

use burn_backend::DeviceId;
use firebox_lazy::goes_on_with_zeros;

/// What was heard while a [`Listener`] existed.
#[derive(Debug)]
struct Heard {
    /// The listening thread. It learns of its own panics in another way.
    own: ThreadId,
    /// The first panic of each device's service threads.
    first: Vec<(DeviceId, String)>,
    /// The first panic of a thread of burn's data loaders, metrics or checkpointers.
    of_burn: Option<String>,
    /// Whether an unnamed thread panicked. The threads of burn's checkpointers are unnamed.
    unnamed: bool,
}

/// Listens for panics of the service threads of one device, or of all devices, until it is dropped.
pub(crate) struct Listener {
    heard: Arc<Mutex<Heard>>,
}

/// The listeners, each with the device it listens to.
static LISTENERS: Mutex<Vec<Listening>> = Mutex::new(Vec::new());

/// The device that is listened to (`None` for all), and what was heard.
type Listening = (Option<DeviceId>, Weak<Mutex<Heard>>);

/// Alive as long as the hook is.
static HOOK: Mutex<Weak<()>> = Mutex::new(Weak::new());

impl Listener {
    pub(crate) fn new(device: DeviceId) -> Self {
        Self::of(Some(device))
    }

    /// Listens to all devices, for when it is not yet known which one is used.
    pub(crate) fn of_all() -> Self {
        Self::of(None)
    }

    fn of(device: Option<DeviceId>) -> Self {
        install();
        let own = std::thread::current().id();
        let heard = Heard { own, first: Vec::new(), of_burn: None, unnamed: false };
        let heard = Arc::new(Mutex::new(heard));
        lock(&LISTENERS).push((device, Arc::downgrade(&heard)));
        Self { heard }
    }

    /// The message of the first panic heard.
    pub(crate) fn heard(&self) -> Option<String> {
        lock(&self.heard).first.first().map(|(_, message)| message.clone())
    }

    /// The message of the first panic heard from one device.
    pub(crate) fn heard_of(&self, device: DeviceId) -> Option<String> {
        let heard = lock(&self.heard);
        let first = heard.first.iter().find(|(of, _)| *of == device);
        first.map(|(_, message)| message.clone())
    }

    /// The message of the first panic of a thread of burn's data loaders, metrics or checkpointers.
    pub(crate) fn heard_of_burn(&self) -> Option<String> {
        lock(&self.heard).of_burn.clone()
    }

    /// Whether an unnamed thread panicked.
    pub(crate) fn unnamed_thread_panicked(&self) -> bool {
        lock(&self.heard).unnamed
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let own = Arc::as_ptr(&self.heard);
        lock(&LISTENERS).retain(|(_, listener)| listener.as_ptr() != own);
    }
}

/// Installs our hook in front of the current one, unless ours is still alive. burn or the program
/// may have put their hook in front of ours, or have removed ours.
fn install() {
    let mut alive = lock(&HOOK);
    if alive.strong_count() > 0 || std::thread::panicking() {
        return;
    }
    let token = Arc::new(());
    *alive = Arc::downgrade(&token);
    let earlier = take_hook();
    set_hook(Box::new(move |info| {
        let _alive = &token;
        // The step will refuse reads, or run in smaller parts. An assertion about zeros means
        // nothing.
        if goes_on_with_zeros() {
            return;
        }
        // firebox's pool continues without the page, or reports the failure itself.
        #[cfg(feature = "cards")]
        if firebox_pool::opens_a_page() {
            log::debug!("the device refused a page: {info}");
            return;
        }
        listen(info);
        earlier(info);
    }));
}

fn listen(info: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let service = thread.name().and_then(served_device);
    if service.is_none() && !thread.name().is_none_or(is_of_burn) {
        return;
    }
    for (device, listener) in lock(&LISTENERS).iter() {
        let Some(listener) = listener.upgrade() else { continue };
        let mut heard = lock(&listener);
        match service {
            None if heard.own == thread.id() => {}
            None => {
                heard.unnamed |= thread.name().is_none();
                heard.of_burn.get_or_insert_with(|| message(info));
            }
            Some(service) if device.is_none_or(|device| device == service) => {
                if heard.first.iter().all(|(of, _)| *of != service) {
                    heard.first.push((service, message(info)));
                }
            }
            Some(_) => {}
        }
    }
}

/// Whether burn uses this name for its own threads: those of data loaders, and the metrics thread.
fn is_of_burn(thread: &str) -> bool {
    thread.starts_with("dataloader-") || thread == "train-worker"
}

/// The device that the thread with this name serves. cubecl-common names these threads
/// `DSU-<type>-<index>` (burn's fusion) and `DSD-<type>-<index>` (the server), in
/// `device/handle/channel.rs`.
fn served_device(thread: &str) -> Option<DeviceId> {
    let id = thread.strip_prefix("DSU-").or_else(|| thread.strip_prefix("DSD-"))?;
    let (kind, index) = id.split_once('-')?;
    Some(DeviceId { type_id: kind.parse().ok()?, index_id: index.parse().ok()? })
}

fn message(info: &PanicHookInfo<'_>) -> String {
    let text = info.payload_as_str().unwrap_or("no message");
    let text = without_backtrace(text);
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("without a name");
    match info.location() {
        Some(place) => format!("thread {thread}, {}:{}: {text}", place.file(), place.line()),
        None => format!("thread {thread}: {text}"),
    }
}

/// Cuts off the backtrace at the end of CubeCL's errors.
pub(crate) fn without_backtrace(message: &str) -> &str {
    let marks = ["Backtrace:", "backtrace:", "No backtrace available"];
    let end = marks.iter().filter_map(|mark| message.find(mark)).min();
    message[..end.unwrap_or(message.len())].trim()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The message of a caught panic.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceId = DeviceId { type_id: 9, index_id: 3 };

    /// Panics on a thread with this name.
    fn panic_on(name: &str) {
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(|| panic!("no memory")).expect("threads can be started");
        thread.join().expect_err("it panicked");
    }

    #[test]
    fn only_panics_of_the_own_device_are_heard() {
        let listener = Listener::new(DEVICE);
        for other in ["DSD-9-4", "DSU-8-3", "DSD-9", "train-worker", "DSD-a-b"] {
            panic_on(other);
        }
        assert_eq!(listener.heard(), None);
        panic_on("DSD-9-3");
        let heard = listener.heard().expect("a panic");
        assert!(heard.starts_with("thread DSD-9-3, "), "{heard}");
        assert!(heard.ends_with(": no memory"), "{heard}");
        let all = Listener::of_all();
        panic_on("DSU-9-3");
        assert_eq!(listener.heard(), Some(heard), "the first one counts");
        assert!(all.heard().is_some_and(|heard| heard.starts_with("thread DSU-9-3, ")));
        assert!(all.heard_of(DEVICE).is_some());
        assert_eq!(all.heard_of(DeviceId { index_id: 4, ..DEVICE }), None);
    }

    #[test]
    fn a_panic_that_nobody_listened_to_is_not_heard_later() {
        drop(Listener::new(DeviceId { type_id: 9, index_id: 5 }));
        panic_on("DSU-9-5");
        assert_eq!(Listener::new(DeviceId { type_id: 9, index_id: 5 }).heard(), None);
    }
}
