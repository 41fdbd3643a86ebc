#!/usr/bin/env python3
"""Random faults under a load of writes, cuts and reads that is checked; HITHER names the binary.

  chaos.py DIR SECONDS SEED FAULTS(csv of cs,mgr,mount,pausecs,pausemount,damage,evict,allcs) [zones] [cs-per-zone]"""
import os,sys,random,struct,subprocess,threading,time,json,errno,signal,glob
DIR,SECS,SEED,FAULTS=sys.argv[1],int(sys.argv[2]),int(sys.argv[3]),sys.argv[4].split(',')
ZONES=sys.argv[5] if len(sys.argv)>5 else 'a,b,c'; PER=sys.argv[6] if len(sys.argv)>6 else '1'
H=os.environ['HITHER']; NW=int(os.environ.get('NW','6'))
rnd=random.Random(SEED)
def sh(*a,check=True,timeout=90):
    r=subprocess.run(a,capture_output=True,text=True,timeout=timeout)
    if check and r.returncode: raise Exception(f'{a}: {r.returncode} {r.stdout} {r.stderr}')
    return r.stdout
T0=time.time()
loglock=threading.Lock()
def log(*a):
    with loglock: print(f'{time.time()-T0:7.2f}',*a,flush=True)
faults=[]
def FAULT(*a):
    log('!!!FAULT',*a); faults.append(a)
    if len(faults)<3 and len(a)>3 and a[0]=='mount': print(subprocess.run([H,'where',f'{DIR}/m{a[1]}/d/f{a[3]}'],capture_output=True,text=True).stdout,flush=True)
    if len(faults)>30: os._exit(3)
PG=DIR+'/pg'
sh('mkdir','-p',DIR)
sh(H,'playground','up','--dir',PG,'--zones',ZONES,'--chunkservers-per-zone',PER)
def procs(): return {p['name']:p for p in json.loads(sh(H,'playground','status','--dir',PG,'--json'))}
P=procs(); MGR=[p for n,p in P.items() if n.startswith('manager')][0]['address']
os.environ['HITHER_CLUSTER']=MGR
CS=[n for n in P if n.startswith('cs')]
mounts=[]; mproc={}; mgen=[0]*9; gen=[0]
zl=ZONES.split(',')
MOPT=os.environ.get('MOPT','')
def domount(i):
    m=f'{DIR}/m{i}'; os.makedirs(m,exist_ok=True)
    lf=open(f'{DIR}/m{i}.log','a')
    p=subprocess.Popen([H,'mount','-f','--wait','-o',f'preflabels=zone={zl[i%len(zl)]}{MOPT}',MGR,m],stdout=lf,stderr=lf)
    mproc[i]=p
    for _ in range(600):
        if os.path.ismount(m): return
        time.sleep(.1)
    log('mount never came',i)
NM=3
for i in range(NM): domount(i); mounts.append(f'{DIR}/m{i}')
os.mkdir(f'{DIR}/m0/d')
SLOTS=eval(os.environ.get('SLOTS','[512,4096,5000,65536,300000,1<<20]'))
ZERO=b'\0'
def content(f,s,v,size):
    n=(size+4095)//4096
    return b''.join(struct.pack('<HHIII',0xC0DE,f,s,b,v)*256 for b in range(n))[:size]
def check(f,s,data,allowed,size):
    """None if good"""
    d=data+ZERO*(size-len(data))
    for v in allowed:
        if v==0:
            if not any(d): return None
        elif d==content(f,s,v,size): return None
    if len(allowed)==1: bad='not the one version'
    for o in range(0,size,16):
        u=d[o:o+16]; ok=False
        for v in allowed:
            e=ZERO*len(u) if v==0 else struct.pack('<HHIII',0xC0DE,f,s,o//4096,v)[:len(u)]
            if u==e: ok=True;break
        if not ok:
            try: w=struct.unpack('<HHIII',u)
            except: w=u
            return f'at {o} of slot {s}: got {w} allowed {sorted(allowed)[-8:]}'
    if len(allowed)>1: return None
    return 'torn'
stop=threading.Event()
stats={'w':0,'r':0,'fsync':0,'err':0,'maxop':0.0}
class F:
    def __init__(self,i):
        self.i=i; self.size=SLOTS[i%len(SLOTS)]; self.n=max(4,min(400,(24<<20)//self.size)); self.al={}; self.v=0; self.dirty=set(); self.weak=0; self.unsynced_gen=None; self.hist=[]
def timed(what,f):
    t=time.time()
    try: return f()
    finally:
        d=time.time()-t
        if d>stats['maxop']: stats['maxop']=d
        if d>35: log('SLOW',what,round(d,1))
def writer(F):
    r=random.Random(SEED*1000+F.i)
    name=f'f{F.i}'
    for m in [0]:
        pass
    while not stop.is_set():
        m=r.randrange(NM); p=f'{DIR}/m{m}/d/{name}'; g=(mgen[m],gen[0])
        try:
            fl=os.O_RDWR|os.O_CREAT
            fd=timed('open',lambda:os.open(p,fl))
        except OSError as e: stats['err']+=1; time.sleep(.3); continue
        try:
            touched=[]; okwrites=True
            for _ in range(r.choice([1,1,3,8])):
                s=r.randrange(F.n); F.v+=1; v=F.v
                F.al.setdefault(s,{0}).add(v)
                d=content(F.i,s,v,F.size)
                F.hist.append((round(time.time()-T0,2),'w',s,v,m))
                o=0
                if r.random()<.06:
                    # cut down to slot s and write again
                    for k in F.al:
                        if k>=s: F.al[k].add(0)
                    F.hist.append((round(time.time()-T0,2),'trunc',s,0,m))
                    timed('trunc',lambda:os.ftruncate(fd,s*F.size))
                    for k in F.al:
                        if k>=s: touched.append((k,0))
                while o<len(d):
                    o+=timed('write',lambda:os.pwrite(fd,d[o:],s*F.size+o))
                stats['w']+=1
                touched.append((s,v))
            x=r.random()
            last=dict(touched)
            # what the file has to show now
            for s,v in last.items():
                F.cur=getattr(F,'cur',{}); F.cur[s]=v
            F.pend=getattr(F,'pend',{}); F.pend.update({s:(v,m,g) for s,v in last.items()})
            if x<.6:
                timed('fsync',lambda:os.fsync(fd)); stats['fsync']+=1; F.hist.append((round(time.time()-T0,2),'fsync',-1,0,m))
                # covers everything written by this mount now; other mounts' unsynced data it may not cover: keep those sets
                # fsync covers what this mount wrote in this life (fd opened after): same mount, same gen
                for s,(v,pm,pg) in list(F.pend.items()):
                    if s in last or (pm==m and pg[0]==mgen[m]):
                        if pg[0]==mgen[pm] or s in last: F.al[s]={v}
                        del F.pend[s]
            if x<.25:
                # strict/weak read back from every mount
                for mm in range(NM): readback(F,mm,r,12)
        except OSError as e:
            for s_,v_ in touched+[(s,0)]: getattr(F,'pend',{}).pop(s_,None)
            for k in F.al:
                if k>=s: getattr(F,'pend',{}).pop(k,None)
            F.hist.append((round(time.time()-T0,2),'ERR',s,F.v,m,str(e)))
            stats['err']+=1
            if e.errno not in (errno.ENOTCONN,errno.ETIMEDOUT,errno.EIO,errno.ESTALE,errno.ECONNABORTED): log('errno',name,m,e)
            elif e.errno in (errno.EIO,): log('EIO',name,m,'gens',g,(mgen[m],gen[0]))
            time.sleep(.1)
        finally:
            try: os.close(fd)
            except OSError: pass
def diag(F,s,al):
    import mmap
    out=[]
    for m in range(NM):
        for fl,nm in((os.O_DIRECT,'direct'),(0,'buffered')):
            if fl and F.size%512: continue
            try:
                fd=os.open(f'{DIR}/m{m}/d/f{F.i}',os.O_RDONLY|fl); b=mmap.mmap(-1,(F.size+4095)//4096*4096); k=os.preadv(fd,[memoryview(b)[:F.size]],s*F.size); os.close(fd)
                out.append((m,nm,k,'BAD '+str(struct.unpack('<HHIII',b[:16])) if check(F.i,s,b[:k],al,F.size) else 'good'))
            except OSError as e: out.append((m,nm,str(e)))
    log('   DIAG',out)
def readback(F,mm,r,n):
    g0=gen[0]
    try: fd=timed('open',lambda:os.open(f'{DIR}/m{mm}/d/f{F.i}',os.O_RDONLY))
    except OSError as e:
        if e.errno==errno.ENOENT and os.path.ismount(f'{DIR}/m{mm}') and mproc[mm].poll() is None and any(0 not in a for a in F.al.values()): FAULT('file gone',F.i,mm)
        return
    try:
        ks=list(F.al); r.shuffle(ks)
        for s in ks[:n]:
            d=timed('read',lambda:os.pread(fd,F.size,s*F.size))
            while 0<len(d)<F.size:
                e=os.pread(fd,F.size-len(d),s*F.size+len(d))
                if not e: break
                d+=e
            stats['r']+=1
            al=F.al[s]
            b=check(F.i,s,d,al,F.size)
            if b:
                diag(F,s,al)
                FAULT('mount',mm,'file',F.i,'slotsize',F.size,b,'len',len(d),'v',F.v,'hist',[h for h in F.hist if (h[1]=='w' and h[2]==s) or (h[1]=='trunc' and h[2]<=s) or h[1]=='ERR'][-12:],'last',F.hist[-6:],'pend',F.pend.get(s) if hasattr(F,'pend') else None)
    except OSError as e:
        stats['err']+=1
        return e
    finally: os.close(fd)
files=[F(i) for i in range(NW)]
ths=[threading.Thread(target=writer,args=(f,),daemon=True) for f in files]
for t in ths: t.start()
def whole(limit=90):
    end=time.time()+limit
    while time.time()<end:
        o=sh(H,'status',check=False)
        if ' healthy' in o: return True
        time.sleep(.5)
    return False
def damage(name,r):
    base=f'{PG}/{name}/chunks'
    fs=[f for f in glob.glob(base+'/*/*') if os.path.getsize(f)>131072]
    if not fs: return
    for f in r.sample(fs,min(3,len(fs))):
        k=r.choice(['flip','flip','trunc','del','table','zeroblock','swap','header'])
        log('  damage',k,f)
        sz=os.path.getsize(f)
        if k=='swap':
            other=r.choice([n for n in CS if n!=name]); g=f.replace('/'+name+'/','/'+other+'/')
            if os.path.exists(g): subprocess.run(['cp','--sparse=always',g,f])
            continue
        with open(f,'r+b') as h:
            if k=='flip':
                for _ in range(5):
                    h.seek(131072+r.randrange(max(1,sz-131072))); b=h.read(1)
                    if b: h.seek(-1,1); h.write(bytes([b[0]^0x55]))
            elif k=='table': h.seek(4096+r.randrange(0,2000)); h.write(b'garbage')
            elif k=='header': h.write(b'X'*64)
            elif k=='zeroblock': h.seek(131072+4096*r.randrange(max(1,(sz-131072)//4096))); h.write(ZERO*4096)
            elif k=='trunc': h.truncate(131072+r.randrange(sz-131072))
        if k=='del': os.unlink(f)
fr=random.Random(SEED+7)
try:
  end=T0+SECS
  while time.time()<end:
    time.sleep(fr.uniform(.5,4))
    k=fr.choice(FAULTS); log('fault',k,stats)
    if k in('cs','damage'):
        n=fr.choice(CS); sh(H,'playground','kill','--dir',PG,n)
        if k=='damage': time.sleep(fr.choice([0,.2,5])); damage(n,fr)
        time.sleep(fr.choice([0,0.1,2,8])); sh(H,'playground','start','--dir',PG,n)
        if not whole(): log('NOT WHOLE in 90 s',sh(H,'status',check=False))
    elif k=='pausecs':
        n=fr.choice(CS); sh(H,'playground','pause','--dir',PG,n); time.sleep(fr.choice([.5,3,12])); sh(H,'playground','resume','--dir',PG,n)
        if not whole(): log('NOT WHOLE in 90 s',sh(H,'status',check=False))
    elif k=='mgr':
        n=[x for x in P if x.startswith('manager')][0]
        sh(H,'playground','kill','--dir',PG,n); time.sleep(fr.choice([0,.1,2,8])); sh(H,'playground','start','--dir',PG,n)
    elif k=='allcs':
        gen[0]+=1
        for n in CS: sh(H,'playground','kill','--dir',PG,n)
        time.sleep(fr.choice([0,2]))
        for n in fr.sample(CS,len(CS)): sh(H,'playground','start','--dir',PG,n); time.sleep(fr.choice([0,1]))
        if not whole(): log('NOT WHOLE in 90 s',sh(H,'status',check=False))
    elif k=='mount':
        i=fr.randrange(NM); mgen[i]+=1; mproc[i].kill(); mproc[i].wait(); mgen[i]+=1
        subprocess.run(['umount','-l',f'{DIR}/m{i}']); domount(i)
    elif k=='pausemount':
        i=fr.randrange(NM); mproc[i].send_signal(signal.SIGSTOP); time.sleep(fr.choice([1,8,25,45])); mproc[i].send_signal(signal.SIGCONT)
    elif k=='evict':
        ss=json.loads(sh(H,'session','ls','--json',check=False) or '[]')
        if ss:
            s=fr.choice(ss); log('  evict',s); 
            for i in range(NM): mgen[i]+=1
            sh(H,'session','evict',str(s.get('session')),check=False)
            for i in range(NM): mgen[i]+=1
except KeyboardInterrupt: pass
except Exception as e: log('EXC',repr(e))
stop.set()
for t in ths: t.join(100)
if any(t.is_alive() for t in ths): FAULT('writers hang after stop')
for n in P:
    if procs()[n]['state']!='running': sh(H,'playground','start','--dir',PG,n,check=False)
log('whole',whole(120),stats)
def final(tag):
    for f in files:
        for mm in range(NM):
            for t in range(5):
                e=readback(f,mm,fr,10**6)
                if e is None: break
                log(tag,'read error',f.i,mm,e); time.sleep(3)
            if e: FAULT(tag,'file unreadable',f.i,mm,e)
final('final')
# fresh mounts: no kernel pages
for i in range(NM):
    subprocess.run(['umount',f'{DIR}/m{i}']); 
    try: mproc[i].wait(40)
    except Exception: FAULT('mount process does not end'); mproc[i].kill()
    if mproc[i].returncode: log('mount exit code',i,mproc[i].returncode)
    domount(i)
final('fresh')
# each server alone-ish: read from every copy: kill each server in turn
for n in CS:
    sh(H,'playground','kill','--dir',PG,n)
    for i in range(NM):
        subprocess.run(['umount',f'{DIR}/m{i}']); mproc[i].wait(60); domount(i)
    final('without '+n)
    sh(H,'playground','start','--dir',PG,n); 
    if not whole(): log('NOT WHOLE',n)
for i in range(NM):
    subprocess.run(['umount','-l',f'{DIR}/m{i}']); 
    try: mproc[i].wait(40)
    except Exception: FAULT('mount process does not end'); mproc[i].kill()
log(sh(H,'status',check=False)); 
subprocess.run(f"grep -aiE 'panick|thread .* at ' {DIR}/*.log {PG}/log/*.log | head -20",shell=True)
sh(H,'playground','down','--dir',PG)
log('END faults',len(faults),stats)
