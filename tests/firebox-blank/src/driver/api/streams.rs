//! Functions for streams and events.

use std::ffi::{c_uint, c_void};
use std::time::Instant;

use super::{c_functions, put};
use crate::books::Field;
use crate::driver::queue::{Event, wait_until};
use crate::driver::{Driver, result};

impl Driver {
    /// The number of a stream and its device. A null handle is the default stream of the current
    /// device.
    ///
    /// As on hardware, an existing stream needs no current context.
    pub(crate) fn stream(&self, handle: *mut c_void) -> Result<(u64, usize), u32> {
        let stream = handle as u64;
        if stream == 0 {
            let device = self.current_device()?;
            return Ok((default_stream(device), device));
        }
        let device = self.state().queues.streams.get(&stream).map(|stream| stream.device);
        match device {
            Some(device) => Ok((stream, self.healthy(device)?)),
            None => {
                self.misuse(0, format!("work on a stream that is not there: {stream:#x}"));
                Err(result::INVALID_HANDLE)
            }
        }
    }

    /// An event: its number, its device, and when it happens. The time is `None` if it was never
    /// recorded.
    fn event(&self, handle: *mut c_void) -> Result<(u64, usize, Option<Instant>), u32> {
        let number = handle as u64;
        let event = self.state().queues.events.get(&number).map(|event| (event.device, event.at));
        match event {
            Some((device, at)) => Ok((number, self.healthy(device)?, at)),
            None => {
                self.misuse(0, format!("work on an event that is not there: {number:#x}"));
                Err(result::INVALID_HANDLE)
            }
        }
    }

    /// Waits until all work on the streams of the selected devices is done.
    pub(crate) fn synchronize(&self, is_meant: impl Fn(usize) -> bool) {
        let state = self.state();
        let streams = state.queues.streams.iter().filter(|(_, stream)| is_meant(stream.device));
        let done = streams.map(|(number, _)| state.queues.done(*number)).max();
        drop(state);
        if let Some(done) = done {
            wait_until(done);
        }
    }
}

/// The number of a device's default stream. All other streams have larger numbers.
const fn default_stream(device: usize) -> u64 {
    device as u64 + 1
}

c_functions! {
    begin: crate::driver::enter;

    fn cuStreamCreate(driver, stream: *mut *mut c_void, _flags: c_uint) {
        let device = driver.current_device()?;
        let mut state = driver.state();
        let number = state.number();
        state.queues.add_stream(number, device);
        driver.books.device(device).count(Field::Streams);
        driver.books.device(device).count(Field::StreamsAlive);
        put(stream, number as *mut c_void)
    }

    fn cuStreamDestroy_v2(driver, stream: *mut c_void) {
        let (number, _) = driver.stream(stream)?;
        if let Some(stream) = driver.state().queues.streams.remove(&number) {
            driver.books.device(stream.device).end(Field::StreamsAlive);
        }
        Ok(())
    }

    fn cuStreamSynchronize(driver, stream: *mut c_void) {
        let (number, device) = driver.stream(stream)?;
        let done = driver.state().queues.done(number);
        wait_until(done);
        driver.state().queues.synchronized(number);
        driver.healthy(device).map(drop)
    }

    fn cuStreamWaitEvent(driver, stream: *mut c_void, event: *mut c_void, _flags: c_uint) {
        let (stream, _) = driver.stream(stream)?;
        let (_, _, at) = driver.event(event)?;
        driver.state().queues.wait(stream, at);
        Ok(())
    }

    fn cuEventCreate(driver, event: *mut *mut c_void, _flags: c_uint) {
        let device = driver.current_device()?;
        let mut state = driver.state();
        let number = state.number();
        state.queues.events.insert(number, Event { device, stream: None, at: None });
        driver.books.device(device).count(Field::Events);
        driver.books.device(device).count(Field::EventsAlive);
        put(event, number as *mut c_void)
    }

    fn cuEventRecord(driver, event: *mut c_void, stream: *mut c_void) {
        let (stream, _) = driver.stream(stream)?;
        let (number, ..) = driver.event(event)?;
        let mut state = driver.state();
        let done = state.queues.done(stream);
        if let Some(event) = state.queues.events.get_mut(&number) {
            (event.stream, event.at) = (Some(stream), Some(done));
        }
        Ok(())
    }

    fn cuEventQuery(driver, event: *mut c_void) {
        match driver.event(event)? {
            (_, _, Some(at)) if at > Instant::now() => Err(result::NOT_READY),
            _ => Ok(()),
        }
    }

    fn cuEventSynchronize(driver, event: *mut c_void) {
        let (number, device, at) = driver.event(event)?;
        if let Some(at) = at {
            wait_until(at);
        }
        let mut state = driver.state();
        if let Some(stream) = state.queues.events.get(&number).and_then(|event| event.stream) {
            state.queues.synchronized(stream);
        }
        drop(state);
        driver.healthy(device).map(drop)
    }

    fn cuEventDestroy_v2(driver, event: *mut c_void) {
        let (number, ..) = driver.event(event)?;
        if let Some(event) = driver.state().queues.events.remove(&number) {
            driver.books.device(event.device).end(Field::EventsAlive);
        }
        Ok(())
    }

    fn cuEventElapsedTime(driver, milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) {
        let ((_, _, start), (_, _, end)) = (driver.event(start)?, driver.event(end)?);
        let (start, end) = start.zip(end).ok_or(result::INVALID_HANDLE)?;
        put(milliseconds, end.saturating_duration_since(start).as_secs_f32() * 1000.0)
    }
}
